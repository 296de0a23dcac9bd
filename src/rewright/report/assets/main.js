/* What is shown is one object; the address keeps it, so that "back" and links work. */
const TABS = [["overview", "Overview", viewOverview], ["graph", "Graph", viewGraph], ["changes", "Changes", viewChanges], ["traffic", "Traffic", viewTraffic], ["misses", "Near misses", viewMisses],
  ...(D.kind === "dump" ? [["kernels", "Kernels", viewKernels]] : [])];
const state = { tab: "overview", snapshot: LAST, module: D.module || "", node: null, base: null, filter: "" };
if (D.module) state.tab = D.kind === "diff" ? "changes" : "graph";
if (D.kind === "diff") state.base = 0;

function setState(change) {
  Object.assign(state, change);
  const hash = "#" + new URLSearchParams(Object.entries(state).filter(([, v]) => v !== null && v !== "")).toString();
  if (hash !== location.hash) history.pushState(null, "", hash);
  render();
}

function readAddress() {
  if (location.hash.length < 2 || !location.hash.includes("=")) return;
  const given = new URLSearchParams(location.hash.slice(1));
  const number = (text) => (text === null || Number.isNaN(Number(text)) ? null : Math.max(0, Math.min(LAST, Number(text))));
  Object.assign(state, { tab: TABS.some(([id]) => id === given.get("tab")) ? given.get("tab") : "overview", snapshot: number(given.get("snapshot")) ?? LAST,
    module: given.get("module") || "", node: given.get("node"), base: number(given.get("base")), filter: given.get("filter") || "" });
}

let drawnView = "";
function render() {
  renderWay();
  renderTree();
  $("tabs").replaceChildren(...TABS.map(([id, label], i) => el("button", { role: "tab", id: `tab-${id}`, "aria-selected": String(state.tab === id), title: `key ${i + 1}`, onclick: () => setState({ tab: id }) }, label)));
  renderPanel();
  // A click on a node changes the panel only; the picture and where one has scrolled to stay, unless the
  // room for it changes.
  const view = JSON.stringify([state.tab, state.snapshot, state.module, state.base, state.filter, state.tab === "graph" && $("panel").hidden]);
  if (view !== drawnView) {
    $("view").replaceChildren(...[TABS.find(([id]) => id === state.tab)[2]()].flat(4).filter(Boolean));
    $("view").scrollTop = 0;
    drawnView = view;
  }
  let found = null;
  for (const box of document.querySelectorAll("svg .box")) {
    const here = state.node !== null && box.dataset.name === state.node;
    box.classList.toggle("here", here);
    if (here) found = box;
  }
  if (found) found.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function renderWay() {
  const items = SNAPSHOTS.flatMap((s, k) => [k ? el("span", { class: "arrow", "aria-hidden": "true" }, "›") : null,
    el("button", { "aria-pressed": String(k === state.snapshot), "data-snapshot": k, title: `stage ${s.stage}`, onclick: () => setState({ snapshot: k }) }, s.label, el("small", null, `${count(s.nodes.length)} nodes`))]);
  if (D.plan) items.push(el("span", { class: "arrow", "aria-hidden": "true" }, "›"), el("button", { "aria-pressed": String(state.tab === "kernels"), title: "the plan of the last stage", onclick: () => setState({ snapshot: LAST, tab: "kernels" }) }, `plan ${D.plan.target}`, el("small", null, `${count(D.plan.launches.length)} launches`)));
  $("way").replaceChildren(...items.filter(Boolean));
}

function showKeys() {
  const keys = [["/", "search"], ["1 … " + TABS.length, "tabs"], ["[  ]", "pass before, pass after"], ["arrows", "in a graph: along its lines, within a row"], ["Enter", "open the node"], ["Esc", "close"], ["?", "this list"]];
  $("keys").replaceChildren(el("h2", null, "Keys"), el("table", null, keys.map(([k, what]) => el("tr", null, el("td", null, el("kbd", null, k)), el("td", null, what)))), el("h2", null, "Signs"), markLegend(), familyLegend(),
    el("p", { class: "note" }, "↓ on a box: its value is read outside of the module. ▸ the kernel that computes it."), el("button", { onclick: () => $("keys").close() }, "Close"));
  $("keys").showModal();
}

document.addEventListener("keydown", (e) => {
  if (e.target.matches("input, select, textarea") || e.ctrlKey || e.metaKey || e.altKey) return;
  const digit = Number(e.key);
  if (e.key === "/") { e.preventDefault(); $("search").focus(); $("search").select(); }
  else if (e.key === "?") showKeys();
  else if (e.key === "[") setState({ snapshot: Math.max(0, state.snapshot - 1) });
  else if (e.key === "]") setState({ snapshot: Math.min(LAST, state.snapshot + 1) });
  else if (e.key === "Escape") setState({ node: null });
  else if (digit >= 1 && digit <= TABS.length) setState({ tab: TABS[digit - 1][0] });
});
window.addEventListener("popstate", () => { readAddress(); render(); });
$("help").addEventListener("click", showKeys);
$("subject").textContent = D.subject;
setUpSearch();
readAddress();
render();
document.documentElement.dataset.ready = "1";
