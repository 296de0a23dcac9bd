/* The data of the page, decoded on demand. Names follow docs/ir.md. */
const D = JSON.parse(document.getElementById("data").textContent);
const SNAPSHOTS = D.snapshots;
const LAST = SNAPSHOTS.length - 1;
const decoded = [];
const indexes = [];

/** The op node that a record stands for. */
function nodeOf(r) {
  if (!decoded[r]) {
    const [names, types, op, operands, attrs, module, rule, cost] = D.nodes[r];
    const c = {};
    D.cost_fields.forEach((field, i) => { c[field] = D.costs[cost][i]; });
    decoded[r] = {
      id: r, names: names.map((n) => D.names[n]), types: types.map((t) => D.types[t]), op: D.ops[op],
      operands: operands.map((n) => (n < 0 ? null : D.names[n])), attrs: D.attrs[attrs],
      module: D.modules[module], rule: D.rules[rule], cost: c,
      bytes: c.activation_read + c.activation_written + c.weight_read + c.constant_read + c.state_read + c.state_written,
    };
  }
  return decoded[r];
}

/** Nodes of a snapshot by the values that they make and read, and its modules. */
function indexOf(k) {
  if (!indexes[k]) {
    const makers = new Map(), readers = new Map(), modules = new Map(), inSet = new Set(SNAPSHOTS[k].nodes);
    for (const r of SNAPSHOTS[k].nodes) {
      const n = nodeOf(r);
      n.names.forEach((name) => makers.set(name, r));
      for (const v of new Set(n.operands)) if (v !== null) {
        if (!readers.has(v)) readers.set(v, []);
        readers.get(v).push(r);
      }
      for (let path = n.module; ; path = path.slice(0, path.lastIndexOf("."))) {
        const m = modules.get(path) || { count: 0, bytes: 0 };
        m.count += 1; m.bytes += n.bytes;
        modules.set(path, m);
        if (path === "") break;
        if (!path.includes(".")) { const all = modules.get("") || { count: 0, bytes: 0 }; all.count += 1; all.bytes += n.bytes; modules.set("", all); break; }
      }
    }
    indexes[k] = { makers, readers, modules, has: inSet };
  }
  return indexes[k];
}

/** The part of a graph that stands in no module. */
const ROOT = ".";
const within = (path, module) => !module || (module === ROOT ? path === "" : false) || path === module || path.startsWith(module + ".");

/** Records of a module's nodes in a snapshot, in order. */
const nodesWithin = (k, module) => SNAPSHOTS[k].nodes.filter((r) => within(nodeOf(r).module, module));

/** Values that a module reads and ops outside make, in the order in which a drawing has them. */
function arriving(k, records) {
  const here = new Set(records), found = new Set(), makers = indexOf(k).makers;
  for (const r of records) for (const v of nodeOf(r).operands) {
    if (v !== null && makers.has(v) && !here.has(makers.get(v))) found.add(v);
  }
  return [...found];
}

/** The snapshot nearest to k that has a record. */
function snapshotWith(r, k) {
  for (let d = 0; d <= LAST; d++) for (const at of [k - d, k + d]) {
    if (at >= 0 && at <= LAST && indexOf(at).has.has(r)) return at;
  }
  return k;
}

/** First and last snapshot that have a record, around k. */
function lifetime(r, k) {
  let from = snapshotWith(r, k), to = from;
  while (from > 0 && indexOf(from - 1).has.has(r)) from -= 1;
  while (to < LAST && indexOf(to + 1).has.has(r)) to += 1;
  return [from, to];
}

/** The part of step s (from snapshot s to s + 1) that made or took a record. */
const partOf = (s, r, side) => (D.steps[s] ? D.steps[s].parts.find((p) => p[side].includes(r)) : undefined);

/**
 * How a record came to be, newest first: [{step, part, from, to}], following the nodes that it replaced.
 * Of a node that a part only changed (it reads another value) the others of the part are no ancestors.
 */
function historyOf(r, k) {
  const found = [];
  let wave = [r], at = lifetime(r, k)[0];
  while (wave.length) {
    let next = null;
    for (const x of wave) {
      const from = lifetime(x, Math.min(at, LAST))[0];
      if (from > 0 && (next === null || from > next)) next = from;
    }
    if (next === null) break;
    const events = new Map(), older = new Set();
    for (const x of wave) {
      if (lifetime(x, Math.min(at, LAST))[0] !== next) { older.add(x); continue; }
      const part = partOf(next - 1, x, "added");
      if (!part) continue;
      if (!events.has(part)) events.set(part, { step: next - 1, part, from: new Set(), to: new Set() });
      const twin = part.removed.find((y) => nodeOf(y).op === nodeOf(x).op && nodeOf(y).names[0] === nodeOf(x).names[0]);
      events.get(part).to.add(x);
      (twin === undefined ? part.removed : [twin]).forEach((y) => { events.get(part).from.add(y); older.add(y); });
    }
    events.forEach((e) => found.push({ step: e.step, part: e.part, from: [...e.from], to: [...e.to] }));
    wave = [...older]; at = next - 1;
    if (found.length > 60) break;
  }
  return found;
}

/** What became of a record: [{step, part}], up to the last snapshot. */
function futureOf(r, k) {
  const found = [], [, to] = lifetime(r, k);
  let current = r, at = to;
  while (at < LAST) {
    const part = partOf(at, current, "removed");
    if (!part) break;
    found.push({ step: at, part });
    const name = nodeOf(current).names[0];
    const heirs = part.added.length ? part.added : [];
    if (!heirs.length) break;
    current = heirs.find((x) => nodeOf(x).names.includes(name)) ?? heirs[0];
    at = lifetime(current, at + 1)[1];
  }
  return found;
}

/** Places of the launches that compute a node of the last snapshot. */
const launchesOf = (n) => (D.plan ? D.plan.of[n.names[0]] || [] : []);

const FAMILIES = [
  ["attention", "attention and choice of entries", /attention|index_|^rope|head_rms/],
  ["mix", "Hyper-Connections", /^hc_/],
  ["route", "routing and experts", /route|expert|moe|swiglu/],
  ["memory", "state: rings, caches, compressors", /ring|cache|compress|kv_|window|add_position|write/],
  ["norm", "norms, rounding, quantisation", /norm|quant|round|hadamard|cast/],
  ["matrix", "matrix products", /linear|embed|head/],
  ["other", "everything else", /./],
];
const familyOf = (op) => FAMILIES.find(([, , pattern]) => pattern.test(op))[0];
