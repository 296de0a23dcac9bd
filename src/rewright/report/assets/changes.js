/* What one step changed: every part with its nodes before and after. */

function viewChanges() {
  const k = state.snapshot;
  if (k === 0) return [el("h1", null, "Nothing changed yet"), el("p", { class: "note" }, "This is where the graph begins. Choose a later pass above.")];
  const step = D.steps[k - 1], from = SNAPSHOTS[k - 1].label, to = SNAPSHOTS[k].label;
  const pass = D.passes.find((p) => p.name === SNAPSHOTS[k].pass);
  const shown = step.parts.filter((p) => p.alike !== null).filter(inModule);
  const saved = (p) => p.saved.total * (1 + p.alike.length);
  shown.sort((a, b) => saved(b) - saved(a));
  const total = step.bytes.before.total - step.bytes.after.total;
  return [el("h1", null, `${from} → ${to}`), pass ? el("p", { class: "lead" }, pass.summary, pass.refuses ? ` It leaves alone: ${pass.refuses}` : "") : null,
    el("p", null, `${count(step.nodes.before)} → ${count(step.nodes.after)} op nodes, `, el("b", { title: count(total) + " bytes" }, total >= 0 ? `${bytes(total)} saved a step` : `${bytes(-total)} more a step`)),
    state.module ? el("p", { class: "note" }, `Only what has a node under ${state.module}. `, el("button", { class: "link", onclick: () => setState({ module: "" }) }, "Show all")) : null,
    markLegend(), shown.length ? shown.map((p) => partBox(p, step, k)) : el("p", { class: "empty" }, "Nothing here.")];
}

function inModule(part) {
  if (!state.module) return true;
  const step = D.steps[state.snapshot - 1];
  return [part, ...part.alike.map((i) => step.parts[i])].some((p) => [...p.removed, ...p.added].some((r) => within(nodeOf(r).module, state.module)));
}

function partBox(part, step, k) {
  const others = part.alike.map((i) => step.parts[i]);
  const mine = [part, ...others].find((p) => state.module && [...p.removed, ...p.added].some((r) => within(nodeOf(r).module, state.module))) || part;
  const rest = [part, ...others].filter((p) => p !== mine);
  const all = part.saved.total * (1 + others.length);
  const box = el("details", { class: "part", ontoggle: () => { if (box.open && !box.dataset.filled) { box.dataset.filled = 1; box.append(twoSides(mine, k)); } } },
    el("summary", null, el("span", null, part.title.replace(/, saves .*$|: saves .*$/, "")), el("span", { class: "mono" }, partName(mine)), el("span", { class: "where" }, alsoIn(rest.map((p) => p.module)).replace(/^ · /, "")),
      el("span", { class: "saved", title: count(all) + " bytes" }, all === 0 ? "" : all > 0 ? `−${bytes(all)}` : `+${bytes(-all)}`)));
  return box;
}

/** What a part is called: the values that come out of it. */
function partName(part) {
  const r = part.added.length ? part.added[part.added.length - 1] : part.removed[part.removed.length - 1];
  const names = nodeOf(r).names;
  return names.slice(0, 2).join(", ") + (names.length > 2 ? ` +${names.length - 2}` : "");
}

function twoSides(part, k) {
  return el("div", { class: "two" }, el("div", null, el("h3", null, SNAPSHOTS[k - 1].label), part.removed.map((r) => chip(r, k - 1, "removed")), part.removed.length ? null : el("p", { class: "empty" }, "nothing")),
    el("div", { class: "mid", "aria-hidden": "true" }, "→"), el("div", null, el("h3", null, SNAPSHOTS[k].label), part.added.map((r) => chip(r, k, "added")), part.added.length ? null : el("p", { class: "empty" }, "nothing: another value is read, or nobody read it")));
}

/** A node as a line that opens it. */
function chip(r, k, mark) {
  const n = nodeOf(r);
  return el("button", { class: `chip ${mark}`, onclick: () => openNode(r, k) }, el("b", null, `${{ removed: "− ", added: "+ " }[mark] || ""}${n.op}`), ` ${n.names[0]}${n.names.length > 1 ? ` +${n.names.length - 1}` : ""}`,
    el("div", { class: "mono" }, n.types.join("  "), ` · ${bytes(n.bytes)}`));
}
