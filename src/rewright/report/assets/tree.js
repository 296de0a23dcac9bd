/* The modules on the left; layers that are alike stand together. */
const opened = new Set(["layers"]);

function renderTree() {
  const modules = indexOf(state.snapshot).modules, children = new Map();
  for (const path of modules.keys()) {
    if (path === "") continue;
    const parent = path.includes(".") ? path.slice(0, path.lastIndexOf(".")) : "";
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(path);
  }
  for (let path = state.module; path.includes("."); ) { path = path.slice(0, path.lastIndexOf(".")); opened.add(path); }
  $("tree").replaceChildren(el("h2", null, `Modules at ${SNAPSHOTS[state.snapshot].label}`), el("ul", null, nodesWithin(state.snapshot, ROOT).length ? treeRow(ROOT, "outside of the layers", nodesWithin(state.snapshot, ROOT).length, []) : null, (children.get("") || []).sort().map((path) => treeItem(path, children, modules))));
}

function treeItem(path, children, modules) {
  const inner = path === "layers" ? layerItems(children, modules) : (children.get(path) || []).sort().map((p) => treeItem(p, children, modules));
  return treeRow(path, path.split(".").pop(), modules.get(path).count, inner);
}

function treeRow(path, label, nodes, inner, note) {
  const isOpen = opened.has(path) && inner.length;
  const toggle = () => { if (opened.has(path)) opened.delete(path); else opened.add(path); renderTree(); };
  return el("li", null,
    el("div", { class: "row" + (state.module === path ? " here" : "") },
      el("button", { class: "open", "aria-expanded": inner.length ? String(Boolean(isOpen)) : null, "aria-label": inner.length ? `open ${path}` : null, tabindex: inner.length ? 0 : -1, onclick: toggle }, inner.length ? (isOpen ? "▾" : "▸") : ""),
      el("button", { class: "name", title: path, onclick: () => { opened.add(path); setState(path === "layers" ? { tab: "overview" } : { module: path, tab: state.tab === "changes" ? "changes" : "graph" }); } }, label),
      el("span", { class: "count", title: `${nodes} op nodes` }, String(nodes))),
    note || null, isOpen ? el("ul", null, inner) : null);
}

/** One item for each sort of layer: the chosen one of its members stands for all. */
function layerItems(children, modules) {
  const chosen = layerOf(state.module);
  return SNAPSHOTS[state.snapshot].layers.map((members) => {
    const shown = members.includes(chosen) ? chosen : members[0], path = `layers.${shown}`;
    const inner = (children.get(path) || []).sort().map((p) => treeItem(p, children, modules));
    const others = members.filter((m) => m !== shown);
    const note = others.length ? el("div", { class: "same", title: "other layers with the same ops and shapes" }, `layer${others.length > 1 ? "s" : ""} ${ranges(others)}: same`) : null;
    return treeRow(path, `layer ${shown}`, modules.get(path).count, inner, note);
  });
}
