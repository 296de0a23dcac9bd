/* Traffic, near misses, kernels. */

function viewTraffic() {
  const columns = ["activations_written", "activations_read", "state_read", "state_written", "weights", "constants", "total"];
  const rows = SNAPSHOTS.map((s, k) => pickRow(() => setState({ snapshot: k }), { class: "pick" + (k === state.snapshot ? " here" : "") }, el("td", null, s.label), el("td", { class: "n" }, count(s.nodes.length)),
    columns.map((c) => el("td", { class: "n" }, count(s.bytes[c])))));
  const s = SNAPSHOTS[state.snapshot];
  const most = Math.max(1, ...s.trips.map((t) => t.written + t.read));
  const trips = s.trips.map((t) => pickRow(() => gotoValue(t.name.replace("layers.*", firstLayerWith(t.name))), {}, barCell(t.written + t.read, 0, most, bytes), el("td", { class: "n" }, count(t.written)), el("td", { class: "n" }, count(t.read)),
    el("td", { class: "n" }, String(t.count)), el("td", { class: "mono" }, t.name), el("td", null, t.producer), el("td", null, Object.entries(t.readers).map(([op, n]) => `${n} ${op}`).join(", ") || "the caller")));
  return [el("h1", null, "Bytes of one step"), el("p", { class: "lead" }, `At ${count(D.context)} tokens of context, from the costs of the ops.`),
    table(["after", ["nodes"], ...columns.map((c) => [c.replace("_", " ")])], rows),
    el("h2", null, `Written and read again at ${s.label}`), el("p", { class: "note" }, "Values that one op writes and others read in the same step, layers added up: what more fusion could save."),
    table(["bytes", ["written"], ["read"], ["values"], "value", "written by", "read by"], trips)];
}

function firstLayerWith(pattern) {
  const [head, tail] = pattern.split("layers.*");
  const makers = indexOf(state.snapshot).makers;
  for (const members of SNAPSHOTS[state.snapshot].layers) for (const m of members) if (makers.has(`${head}layers.${m}${tail}`)) return `layers.${m}`;
  return "layers.0";
}

function viewMisses() {
  const passes = [...new Set(D.misses.map((m) => m.pass))];
  const select = el("select", { "aria-label": "pass", onchange: (e) => setState({ filter: e.target.value }) }, el("option", { value: "" }, "all passes"), passes.map((p) => el("option", { value: p, selected: p === state.filter }, p)));
  const rows = D.misses.filter((m) => !state.filter || m.pass === state.filter).map((m) => pickRow(() => gotoValue(m.anchor), {}, el("td", null, m.pass), el("td", null, m.rule), el("td", { class: "n" }, String(m.anchors.length)),
    el("td", { class: "mono" }, m.anchor, el("div", { class: "where" }, alsoIn(m.anchors.slice(1)).replace(/^ · /, ""))), el("td", null, m.reason)));
  const refusals = D.plan ? foldRefusals() : [];
  return [el("h1", null, "Why not more"), el("p", { class: "lead" }, "Places where a rule matched in part and left the graph alone, with its reason; and kernels that were asked for a unit and did not take it."),
    el("h2", null, "Near misses of the passes"), el("div", { class: "tools" }, select), rows.length ? table(["pass", "rule", ["places"], "at", "reason"], rows) : el("p", { class: "empty" }, D.passes.length ? "None." : "No pass ran."),
    D.plan ? [el("h2", null, `Kernels of ${D.plan.target} that refused`), refusals.length ? table(["kernel", ["units"], "unit", "reason"], refusals.map((r) => pickRow(() => gotoValue(r.units[0].split("/")[0]), {}, el("td", { class: "mono" }, r.symbol),
      el("td", { class: "n" }, String(r.units.length)), el("td", { class: "mono" }, r.units[0], el("div", { class: "where" }, alsoIn(r.units.slice(1)).replace(/^ · /, ""))), el("td", null, r.reason)))) : el("p", { class: "empty" }, "None refused.")] : null];
}

function foldRefusals() {
  const groups = new Map();
  for (const r of D.plan.refusals) {
    const key = [r.symbol, r.unit.replace(/layers\.\d+/g, "*"), r.reason.replace(/layers\.\d+/g, "*")].join("|");
    if (!groups.has(key)) groups.set(key, { symbol: r.symbol, reason: r.reason, units: [] });
    groups.get(key).units.push(r.unit);
  }
  return [...groups.values()];
}

function viewKernels() {
  if (!D.plan) return [el("h1", null, "No plan"), el("p", { class: "note" }, `${D.no_plan}.`)];
  const totals = new Map(), all = { calls: 0, bytes: 0 };
  for (const l of D.plan.launches) {
    const t = totals.get(l.symbol) || { calls: 0, bytes: 0 };
    t.calls += 1; t.bytes += l.bytes.total; totals.set(l.symbol, t);
    all.calls += 1; all.bytes += l.bytes.total;
  }
  const kernels = [...totals].sort((a, b) => b[1].bytes - a[1].bytes).map(([symbol, t]) => el("tr", null, el("td", { class: "mono once" }, symbol), el("td", { class: "n" }, count(t.calls)), barCell(t.bytes, 0, all.bytes, bytes), el("td", { class: "mono" }, short(D.plan.kernels[symbol] || "", 110))));
  const rows = D.plan.launches.map((l, i) => [l, i]).filter(([l]) => l.alike !== null).filter(([l]) => !state.module || [l, ...l.alike.map((i) => D.plan.launches[i])].some((x) => x.nodes.some((u) => within(u.split("/")[0], state.module))))
    .map(([l, i]) => pickRow(() => gotoValue(l.nodes[0].split("/")[0]), { id: `launch-${i}` }, el("td", { class: "n" }, String(i)), el("td", { class: "mono once" }, l.symbol), bytesCell(l.bytes.weights), bytesCell(l.bytes.state), bytesCell(l.bytes.activations),
      el("td", { class: "mono" }, l.nodes.join(", "), el("div", { class: "where" }, alsoIn(l.alike.map((j) => D.plan.launches[j].phase)).replace(/^ · /, "")))));
  return [el("h1", null, `${count(all.calls)} launches for ${D.plan.target}`), el("p", { class: "lead" }, `${bytes(D.plan.arena_bytes)} of activations, ${bytes(D.plan.state_bytes)} of state. A launch may compute several nodes, or a part of one (node/part).`),
    table(["kernel", ["launches"], "bytes", "computes"], kernels), el("h2", null, "Launches in order"),
    el("p", { class: "note" }, "Launches that are alike in other layers are listed once. ", state.module ? [`Only those of ${state.module}. `, el("button", { class: "link", onclick: () => setState({ module: "" }) }, "Show all")] : null),
    table([["#"], "kernel", ["weights"], ["state"], ["activations"], "computes"], rows)];
}
