/* The graph of a module, alone or beside the same module at another stage. */

function viewGraph() {
  if (!state.module) return [el("h1", null, "The graph of a module"), el("p", { class: "note" }, "Choose a module on the left, or a layer."), layerStrip()];
  const k = state.snapshot, base = state.base !== null && state.base !== k ? state.base : null;
  const select = el("select", { id: "base", "aria-label": "compare with", onchange: (e) => setState({ base: e.target.value === "" ? null : Number(e.target.value) }) },
    el("option", { value: "" }, "nothing"), SNAPSHOTS.map((s, i) => el("option", { value: i, selected: base === i, disabled: i === k }, s.label)));
  const nodes = nodesWithin(k, state.module);
  const sum = nodes.reduce((total, r) => total + nodeOf(r).bytes, 0);
  const head = [el("div", { class: "crumbs" }, crumbs()), el("h1", null, state.module === ROOT ? "outside of the layers" : state.module),
    el("p", { class: "lead" }, `${count(nodes.length)} op nodes at ${SNAPSHOTS[k].label}, ${bytes(sum)} a step. ${sameNote()}`),
    el("div", { class: "tools" }, el("label", null, "compare with ", select), el("span", null, [["fit", null], ["50 %", 0.5], ["100 %", 1]].map(([label, value]) => el("button", { "aria-pressed": String(zoom === value), onclick: () => setZoom(value) }, label))), el("span", null, "box: op · value · type · ", k === LAST && D.plan ? "kernel" : "what it reads", " · bytes a step"))];
  const side = (at, other, name) => {
    const picture = drawing(at, state.module, other, name);
    return el("div", { class: "drawing", "data-snapshot": at }, el("h3", null, SNAPSHOTS[at].label, other === null ? "" : ` (${count(nodesWithin(at, state.module).length)} op nodes)`),
      picture || tooLarge(at));
  };
  const drawn = base === null ? side(k, null, "") : el("div", { class: "sides" }, side(Math.min(base, k), Math.max(base, k), "removed"), side(Math.max(base, k), Math.min(base, k), "added"));
  return [...head, base === null ? familyLegend() : markLegend(), el("br"), drawn];
}

function sameNote() {
  const layer = layerOf(state.module);
  if (layer === null) return "";
  const others = (SNAPSHOTS[state.snapshot].layers.find((members) => members.includes(layer)) || []).filter((m) => m !== layer);
  return others.length ? `${others.length > 1 ? "Layers" : "Layer"} ${ranges(others)} ${others.length > 1 ? "are" : "is"} the same.` : "";
}

function tooLarge(k) {
  const inner = [...indexOf(k).modules.keys()].filter((p) => p.startsWith(state.module + ".") && !p.slice(state.module.length + 1).includes("."));
  if (!indexOf(k).modules.has(state.module)) return el("p", { class: "empty" }, "No node stands in this module at this stage: they were rewritten into nodes of others.");
  return el("p", { class: "empty" }, "Too many nodes for one picture; choose a part: ", inner.sort().map((p) => [el("button", { class: "link", onclick: () => setState({ module: p }) }, p), " "]));
}

function crumbs() {
  if (state.module === ROOT) return [];
  const parts = state.module.split(".");
  return parts.map((part, i) => {
    const path = parts.slice(0, i + 1).join(".");
    const go = () => setState(path === "layers" ? { tab: "overview" } : { module: path });
    return [i ? " › " : "", el("button", { class: "link", onclick: go }, part)];
  });
}
