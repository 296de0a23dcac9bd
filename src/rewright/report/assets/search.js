/* Search over values of all snapshots, ops and modules. */
const MOST_HITS = 40;
let everyName = null;

/** Name -> the newest snapshot that makes it. */
function allNames() {
  if (!everyName) {
    everyName = new Map();
    for (let k = 0; k <= LAST; k++) for (const r of SNAPSHOTS[k].nodes) for (const v of D.nodes[r][0]) everyName.set(D.names[v], k);
  }
  return everyName;
}

function findHits(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return [];
  const here = indexOf(state.snapshot), hits = [];
  const fits = (t) => { const low = t.toLowerCase(); return words.every((w) => low.includes(w)); };
  for (const path of here.modules.keys()) if (path && fits(path)) hits.push({ text: path, kind: "module", rank: 0, go: () => setState({ module: path, tab: "graph" }) });
  for (const [name, k] of allNames()) {
    const present = here.makers.has(name), at = present ? state.snapshot : k;
    const op = nodeOf(indexOf(at).makers.get(name)).op;
    if (fits(`${name} ${op}`)) hits.push({ text: name, kind: present ? op : `${op}, at ${SNAPSHOTS[at].label}`, rank: present ? 1 : 2, go: () => { state.snapshot = at; gotoValue(name); } });
  }
  const low = text.toLowerCase().trim();
  const score = (h) => (h.text.toLowerCase() === low ? 0 : h.text.toLowerCase().endsWith(low) ? 1 : 2);
  return hits.sort((a, b) => score(a) - score(b) || a.rank - b.rank || a.text.length - b.text.length || (a.text < b.text ? -1 : 1));
}

function setUpSearch() {
  const input = $("search"), list = $("hits");
  let hits = [], at = 0;
  const close = () => { list.hidden = true; input.setAttribute("aria-expanded", "false"); };
  const choose = (i) => { if (hits[i]) { close(); input.blur(); hits[i].go(); } };
  const show = () => {
    hits = findHits(input.value); at = 0;
    list.hidden = !input.value.trim(); input.setAttribute("aria-expanded", String(!list.hidden));
    const rows = hits.slice(0, MOST_HITS).map((h, i) => el("li", { role: "option", "aria-selected": String(i === 0), onmousedown: (e) => { e.preventDefault(); choose(i); } }, el("span", { class: "mono" }, h.text), el("span", { class: "kind" }, h.kind)));
    if (hits.length > MOST_HITS) rows.push(el("li", { class: "kind" }, `and ${count(hits.length - MOST_HITS)} more`));
    if (!hits.length) rows.push(el("li", { class: "kind" }, "Nothing has this name at any stage."));
    list.replaceChildren(...rows);
  };
  input.addEventListener("input", show);
  input.addEventListener("focus", () => { if (input.value) show(); });
  input.addEventListener("blur", close);
  input.addEventListener("keydown", (e) => {
    if (e.key === "ArrowDown" || e.key === "ArrowUp") {
      e.preventDefault();
      at = Math.max(0, Math.min(Math.min(hits.length, MOST_HITS) - 1, at + (e.key === "ArrowDown" ? 1 : -1)));
      [...list.children].forEach((li, i) => { li.setAttribute("aria-selected", String(i === at)); if (i === at) li.scrollIntoView({ block: "nearest" }); });
    }
    if (e.key === "Enter") choose(at);
    if (e.key === "Escape") { input.value = ""; close(); input.blur(); }
  });
}
