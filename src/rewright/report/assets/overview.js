/* The first page: what there is, what each pass did to it, which layers are alike. */

function viewOverview() {
  return D.kind === "diff" ? diffOverview() : dumpOverview();
}

function headline() {
  const a = D.graph.attrs;
  return [el("h1", null, D.kind === "diff" ? "What differs" : `${D.subject.replace(/\.json$/, "").split("/").pop()}, ${D.graph.name}`),
    el("p", { class: "lead" }, `One step: ${count(a.tokens)} token${a.tokens > 1 ? "s" : ""}, batch ${a.batch}, ${count(D.context)} tokens of context, numerics ${a.numerics}. ` +
      "Bytes are those of the ops' costs for one such step.")];
}

const card = (value, label, title) => el("div", { class: "card", title }, el("b", null, value), el("span", null, label));

function dumpOverview() {
  const first = SNAPSHOTS[0], last = SNAPSHOTS[LAST];
  const saved = first.bytes.activations - last.bytes.activations;
  const cards = [
    card(`${count(first.nodes.length)} → ${count(last.nodes.length)}`, "op nodes, traced → last"),
    D.plan ? card(count(D.plan.launches.length), `kernel launches, target ${D.plan.target}`) : null,
    card(`${bytes(first.bytes.activations)} → ${bytes(last.bytes.activations)}`, `activations moved (${bytes(saved)} saved)`, count(saved) + " bytes saved"),
    card(bytes(last.bytes.weights), "weights read", count(last.bytes.weights) + " bytes"),
    card(bytes(last.bytes.total), "moved in all", count(last.bytes.total) + " bytes"),
  ];
  return [...headline(), el("div", { class: "cards" }, cards), D.no_plan ? el("p", { class: "note" }, `No plan: ${D.no_plan}.`) : null,
    el("h2", null, "What each pass did"),
    el("p", { class: "note" }, "Solid: what is left. Hatched: what this pass took away. A row opens what the pass changed; near misses are places where a rule almost matched."),
    passTable(), el("h2", null, "Layers"), layerStrip()];
}

function passTable() {
  const most = SNAPSHOTS[0], rows = [];
  rows.push(pickRow(() => setState({ snapshot: 0, tab: "graph" }), { class: "pick" + (state.snapshot === 0 ? " here" : "") },
    el("td", null, SNAPSHOTS[0].label), el("td", null, SNAPSHOTS[0].stage), el("td", { class: "n" }, ""), el("td", { class: "n" }, ""),
    barCell(most.nodes.length, 0, most.nodes.length, count), barCell(most.bytes.activations, 0, most.bytes.activations, bytes),
    el("td", null, "the graph as the frontend traced it")));
  const listed = D.passes.length ? D.passes : SNAPSHOTS.slice(1).map((s) => ({ name: s.label, stage: s.stage, enabled: true, matches: "", near: "", summary: "" }));
  for (const p of listed) {
    let at = SNAPSHOTS.findIndex((s) => s.pass === p.name);
    if (at < 0 && !D.passes.length) at = SNAPSHOTS.findIndex((s) => s.label === p.name);
    const before = p.before ? p.before.nodes : SNAPSHOTS[at - 1].nodes.length, after = p.after ? p.after.nodes : SNAPSHOTS[at].nodes.length;
    const act = (s) => s.activation_bytes_read + s.activation_bytes_written;
    const moved = p.before ? [act(p.before), act(p.after)] : [SNAPSHOTS[at - 1].bytes.activations, SNAPSHOTS[at].bytes.activations];
    const cells = [el("td", null, p.name), el("td", null, p.stage), el("td", { class: "n" }, p.enabled ? (p.matches === 0 ? "–" : String(p.matches)) : "off"),
      el("td", { class: "n" }, p.near ? el("button", { class: "link", onclick: (e) => { e.stopPropagation(); setState({ tab: "misses", filter: p.name }); } }, String(p.near)) : "–"),
      barCell(after, before - after, most.nodes.length, count), barCell(moved[1], moved[0] - moved[1], most.bytes.activations, bytes), el("td", null, p.summary)];
    rows.push(at > 0 ? pickRow(() => setState({ snapshot: at, tab: "changes" }), { class: "pick" + (state.snapshot === at ? " here" : "") }, cells) : el("tr", { class: "off" }, cells));
  }
  return table(["pass", "stage", ["matches"], ["near misses"], "op nodes", "activation bytes", "what it does"], rows);
}

/** A bar of what is left and, hatched, what went away. */
function barCell(value, gone, most, text) {
  const width = (n) => `width:${Math.max(0, (120 * n) / most).toFixed(1)}px`;
  return el("td", { class: "bars", title: `${count(value)}${gone ? `, ${count(gone)} less than before` : ""}` },
    el("span", { class: "bar", style: width(value) }), gone > 0 ? el("span", { class: "bar less", style: width(gone) }) : null,
    ` ${text(value)}`, gone > 0 ? el("small", null, ` −${text(gone).replace(/^−/, "")}`) : null);
}

const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
/** Every layer with a letter for its sort; a click draws it. */
function layerStrip() {
  const classes = SNAPSHOTS[state.snapshot].layers, cells = [];
  classes.forEach((layers, i) => layers.forEach((layer) => { cells[layer] = LETTERS[i % 26]; }));
  const strip = el("div", { class: "strip" }, cells.map((letter, layer) =>
    el("button", { title: `layer ${layer}, sort ${letter}`, onclick: () => setState({ module: `layers.${layer}`, tab: "graph" }) }, letter, el("small", null, String(layer)))));
  const modules = indexOf(state.snapshot).modules;
  const rows = classes.map((layers, i) => {
    const m = modules.get(`layers.${layers[0]}`);
    return pickRow(() => setState({ module: `layers.${layers[0]}`, tab: "graph" }), {}, el("td", null, LETTERS[i % 26]), el("td", { class: "n" }, String(layers.length)),
      el("td", { class: "n" }, String(m.count)), bytesCell(m.bytes), el("td", null, ranges(layers)));
  });
  return [el("p", { class: "note" }, "Layers with one letter have the same ops on the same shapes: only their number differs. A click draws the layer."), strip,
    table(["sort", ["layers"], ["op nodes each"], ["bytes each"], "layers"], rows)];
}

function diffOverview() {
  const [a, b] = SNAPSHOTS, step = D.steps[0];
  const delta = b.bytes.total - a.bytes.total, nodes = b.nodes.length - a.nodes.length;
  const sign = (n, text) => (n > 0 ? "+" : n < 0 ? "−" : "") + text(Math.abs(n));
  const rows = [["op nodes", a.nodes.length, b.nodes.length, count],
    ...["activations_read", "activations_written", "weights", "constants", "state_read", "state_written", "total"]
      .map((key) => [key.replace("_", " ") + " bytes", a.bytes[key], b.bytes[key], count])];
  const most = Math.max(a.bytes.activations, b.bytes.activations);
  return [...headline(), el("p", { class: "lead mono" }, `A  ${D.specs[0]}`, el("br"), `B  ${D.specs[1]}`),
    el("div", { class: "cards" }, card(sign(nodes, count), "op nodes"), card(sign(delta, bytes), "bytes a step", count(delta) + " bytes"),
      card(String(step.parts.filter((p) => p.alike !== null).length), "different changes, layers taken together")),
    el("h2", null, "Totals"),
    table(["", ["A"], ["B"], ["B − A"]], rows.map(([label, x, y]) => el("tr", null, el("td", null, label), el("td", { class: "n" }, count(x)), el("td", { class: "n" }, count(y)),
      el("td", { class: "n" }, x === y ? "=" : sign(y - x, count))))),
    el("h2", null, "Activations"), table(["", ""], [["A", a], ["B", b]].map(([label, s]) => el("tr", null, el("td", null, label), barCell(s.bytes.activations, 0, most, bytes)))),
    D.header.length ? [el("h2", null, "Made differently"), table(["", "A", "B"], D.header.map((h) => el("tr", null, el("td", null, h.name), el("td", null, JSON.stringify(h.before)), el("td", null, JSON.stringify(h.after)))))] : null,
    el("h2", null, "What did it"), el("p", { class: "note" }, "Bytes saved by B; negative where B moves more. All rows together are the difference of the totals."),
    table(["rule", ["places"], ["nodes"], ["activations saved"], ["constants saved"], ["state saved"]], D.savings.map((r) =>
      pickRow(() => setState({ tab: "changes", snapshot: 1 }), {}, el("td", null, r.label), el("td", { class: "n" }, count(r.places)), el("td", { class: "n" }, `${count(r.before)} → ${count(r.after)}`),
        el("td", { class: "n" }, count(r.saved.activation)), el("td", { class: "n" }, count(r.saved.constant)), el("td", { class: "n" }, count(r.saved.state))))),
    step.parts.length ? null : el("p", { class: "empty" }, "The two graphs have the same structure."),
    el("h2", null, "Layers of B"), layerStrip()];
}
