/* One node: what it is, what it costs, where it came from, what computes it, why not more. */

function openNode(r, k) {
  const n = nodeOf(r);
  const module = within(n.module, state.module) && state.module ? state.module : n.module || ROOT;
  setState({ node: n.names[0], snapshot: snapshotWith(r, k), module: state.tab === "graph" ? module : state.module });
}

/** Show a value wherever it is: at this snapshot, or at the nearest one that has it. */
function gotoValue(name) {
  for (let d = 0; d <= LAST; d++) for (const k of [state.snapshot - d, state.snapshot + d]) {
    if (k < 0 || k > LAST) continue;
    const r = indexOf(k).makers.get(name);
    if (r !== undefined) { setState({ tab: "graph", snapshot: k, module: nodeOf(r).module || ROOT, node: nodeOf(r).names[0] }); return true; }
  }
  return false;
}

function renderPanel() {
  const panel = $("panel");
  const r = state.node ? indexOf(state.snapshot).makers.get(state.node) : undefined;
  panel.hidden = r === undefined;
  if (r === undefined) return;
  const k = state.snapshot, n = nodeOf(r);
  panel.replaceChildren(...[el("button", { class: "close", "aria-label": "close", onclick: () => setState({ node: null }) }, "×"), el("h1", null, n.op), el("p", { class: "note" }, D.docs[n.op]),
    valueList(n), costs(n), kernelPart(n, k), whyNot(r, n, k), life(r, k), neighbours(n, k), attributes(n)].flat(5).filter(Boolean));
  panel.scrollTop = 0;
}

const section = (title, ...content) => [el("h2", null, title), ...content];
const valueLink = (v) => el("button", { class: "link mono", onclick: () => gotoValue(v) }, v);

function valueList(n) {
  return section("Gives", n.names.map((v, i) => el("div", { class: "mono" }, el("b", null, v), ` : ${n.types[i]}`)), el("div", { class: "note" }, `in module ${n.module || "(root)"}, made by `, n.rule ? `rule ${n.rule} of pass ${D.rule_pass[n.rule] || "(unknown)"}` : "the frontend"));
}

function costs(n) {
  const c = n.cost, rows = [["activations read", c.activation_read], ["activations written", c.activation_written], ["weights read", c.weight_read], ["tables read", c.constant_read], ["state read", c.state_read], ["state written", c.state_written], ["all", n.bytes]];
  const total = SNAPSHOTS[state.snapshot].bytes.total;
  return section("Cost of a step", el("table", null, rows.filter(([label, x]) => x || label === "all").map(([label, x]) => el("tr", null, el("td", null, label), el("td", { class: "n" }, count(x)), el("td", { class: "n" }, x && x < total / 20000 ? "< 0.01 %" : `${((100 * x) / total).toFixed(2)} %`)))),
    el("div", { class: "note" }, `bytes; ${count(c.flops)} operations`));
}

function kernelPart(n, k) {
  if (!D.plan) return null;
  if (k !== LAST) return section("Kernel", el("p", { class: "note" }, "Kernels compute the nodes of the last stage. "), futureKernel(n, k));
  const launches = launchesOf(n).map((i) => [i, D.plan.launches[i]]);
  if (!launches.length) return section("Kernel", el("p", { class: "note" }, "None: it only names another value's bytes."));
  return section(`Kernel (${D.plan.target})`, launches.map(([i, l]) => el("div", null, el("b", { class: "mono" }, l.symbol), ` launch ${i} of ${D.plan.launches.length}`, el("div", { class: "note" }, `phase `, el("span", { class: "mono" }, l.phase), `, ${bytes(l.bytes.total)}`,
    l.nodes.length > 1 ? el("ul", null, l.nodes.map((u) => el("li", { class: "mono" }, u.split("/")[0] === n.names[0] ? el("b", null, u) : u))) : null))));
}

function futureKernel(n, k) {
  const r = indexOf(k).makers.get(n.names[0]), steps = futureOf(r, k);
  const heirs = steps.length ? steps[steps.length - 1].part.added : [r];
  const heir = heirs.find((x) => launchesOf(nodeOf(x)).length) ?? heirs[0];
  if (heir === undefined) return el("p", { class: "note" }, "This node is gone by then.");
  return el("p", null, "There it is part of ", valueLinkAt(heir, LAST), launchesOf(nodeOf(heir)).map((i) => [", ", el("b", { class: "mono" }, D.plan.launches[i].symbol)]));
}

const valueLinkAt = (r, k) => el("button", { class: "link mono", onclick: () => { const n = nodeOf(r); setState({ snapshot: snapshotWith(r, k), node: n.names[0], module: n.module || ROOT }); } }, `${nodeOf(r).op} ${nodeOf(r).names[0]}`);

function life(r, k) {
  const past = historyOf(r, k).reverse(), future = futureOf(r, k);
  const item = ({ step, part, from, to }) => el("li", null, el("b", null, SNAPSHOTS[step + 1].label), " ", part.title.replace(/^\S+ : .* = .*$/, "new node"),
    el("div", null, (from || part.removed).map((x) => el("div", null, el("span", { class: "minus" }, "− "), valueLinkAt(x, step))), (to || part.added).map((x) => el("div", null, el("span", { class: "plus" }, "+ "), valueLinkAt(x, step + 1)))));
  const traced = el("li", null, el("b", null, SNAPSHOTS[0].label), past.length ? " the nodes that it was made of" : " it is there from the beginning");
  return section("Where it came from", el("ol", { class: "life" }, traced, past.map((p) => item(p))), future.length ? section("What becomes of it", el("ol", { class: "life" }, future.map((p) => item(p)))) : null);
}

function whyNot(r, n, k) {
  const names = new Set(n.names);
  for (const { from } of historyOf(r, k)) from.forEach((x) => nodeOf(x).names.forEach((v) => names.add(v)));
  const misses = D.misses.filter((m) => m.anchors.some((a) => names.has(a)) || names.has(m.node));
  const refusals = k === LAST && D.plan ? D.plan.refusals.filter((x) => x.unit.split("/")[0] === n.names[0]) : [];
  const apart = k === LAST && D.plan ? Object.entries(D.plan.apart).filter(([v]) => n.names.includes(v) || v.split("/")[0] === n.names[0]).flatMap(([, why]) => why) : [];
  const lines = [...misses.map((m) => `${m.pass}/${m.rule} at ${m.anchors.find((a) => names.has(a)) || m.anchor}: ${m.reason}`), ...apart.map((i) => D.plan.reasons[i]), ...refusals.map((x) => `${x.symbol} refused ${x.unit}: ${x.reason}`)];
  return section("Why not fused further", lines.length ? el("ul", null, lines.map((t) => el("li", null, t))) : el("p", { class: "note" }, k === LAST ? "No rule nearly matched here, and no kernel refused." : "No rule nearly matched here."));
}

function neighbours(n, k) {
  const index = indexOf(k);
  const read = n.operands.filter((v) => v !== null).map((v) => el("li", null, index.makers.has(v) ? valueLink(v) : el("span", { class: "mono" }, v, D.leaves[v] ? ` : ${D.types[D.leaves[v][1]]} (${D.leaves[v][0]})` : "")));
  const readers = n.names.flatMap((v) => index.readers.get(v) || []);
  return [...section("Reads", el("ul", null, read)), ...section("Read by", readers.length ? el("ul", null, [...new Set(readers)].map((x) => el("li", null, valueLinkAt(x, k)))) : el("p", { class: "note" }, "nobody in the step: a result or a state"))];
}

const attributes = (n) => Object.keys(n.attrs).length ? section("Attributes", el("div", { class: "mono" }, Object.entries(n.attrs).sort().map(([key, v]) => el("div", null, `${key} = ${JSON.stringify(v)}`)))) : null;
