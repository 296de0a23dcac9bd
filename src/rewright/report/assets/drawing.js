/* Draws the part of a module as boxes and lines; where they stand was computed with the report. */
const BOX_W = 232, BOX_H = 84, GAP_Y = 46;

/** How a record stands to another snapshot: "" where both have it. */
function markOf(r, other, side) {
  if (other === null || indexOf(other).has.has(r)) return "";
  const maker = indexOf(other).makers.get(nodeOf(r).names[0]);
  const same = maker !== undefined && nodeOf(maker).op === nodeOf(r).op;
  return same ? "changed" : side;
}
const MARKS = { removed: "−", added: "+", changed: "~" };

/** The drawing of a module at snapshot k; `other` is the snapshot it is compared with, or null. */
function drawing(k, module, other, side) {
  const at = SNAPSHOTS[k].views[module];
  if (at === undefined) return null;
  const layout = D.layouts[at], records = nodesWithin(k, module), outside = arriving(k, records);
  const scale = scaleFor(layout.w + 4, other === null ? 1 : 2);
  const root = svg("svg", { width: Math.round((layout.w + 4) * scale), height: Math.round((layout.h + 4) * scale), viewBox: `-2 -2 ${layout.w + 4} ${layout.h + 4}`,
    role: "group", "aria-label": `graph of ${module}` });
  const lines = layout.lines.map(([from, to, through]) => {
    const path = svg("path", { class: "edge", d: curve(layout.boxes[from], layout.boxes[to], through), "data-from": from, "data-to": to });
    root.append(path);
    return path;
  });
  const leaving = new Set(records.flatMap((r) => nodeOf(r).names.filter((v) =>
    (indexOf(k).readers.get(v) || []).some((x) => !within(nodeOf(x).module, module)))));
  const boxes = layout.boxes.map(([x, y], i) => {
    const group = i < records.length ? nodeBox(records[i], k, module, markOf(records[i], other, side), leaving)
      : outsideBox(outside[i - records.length], k, module);
    group.setAttribute("transform", `translate(${x},${y})`);
    group.dataset.box = i;
    const lit = (on) => lines.forEach((p) => { if (p.dataset.from === String(i) || p.dataset.to === String(i)) p.classList.toggle("lit", on); });
    group.addEventListener("mouseenter", () => lit(true));
    group.addEventListener("mouseleave", () => lit(false));
    group.addEventListener("focus", () => lit(true));
    group.addEventListener("blur", () => lit(false));
    group.addEventListener("keydown", (e) => walk(e, i, layout, boxes));
    return group;
  });
  root.append(...boxes);
  return root;
}

/** How large a drawing is shown: as wide as there is room, yet so that it can be read. */
function scaleFor(width, sides) {
  if (zoom !== null) return zoom;
  const room = ($("view").clientWidth - 40) / sides - (sides - 1) * 18;
  return Math.min(1, Math.max(sides > 1 ? 0.5 : 0.7, room / width));
}
let zoom = null;
function setZoom(value) { zoom = value; drawnView = ""; render(); }

/** A line from the lower edge of a box through the gaps of the rows that it passes. */
function curve(from, to, through) {
  const points = [[from[0] + BOX_W / 2, from[1] + BOX_H], ...through.flatMap(([x, y]) => [[x, y], [x, y + BOX_H]]), [to[0] + BOX_W / 2, to[1]]];
  let d = `M${points[0]}`;
  for (let i = 1; i < points.length; i++) {
    const [x0, y0] = points[i - 1], [x1, y1] = points[i];
    d += x0 === x1 ? `L${x1},${y1}` : `C${x0},${(y0 + y1) / 2} ${x1},${(y0 + y1) / 2} ${x1},${y1}`;
  }
  return d;
}

function nodeBox(r, k, module, mark, leaving) {
  const n = nodeOf(r), launches = k === LAST ? launchesOf(n) : [];
  const leaves = n.operands.filter((v) => v !== null && D.leaves[v] && !indexOf(k).makers.has(v));
  const kinds = (kind) => leaves.filter((v) => D.leaves[v][0] === kind).length;
  const reads = [[kinds("weight"), "weight"], [kinds("constant"), "table"], [kinds("state"), "state"]]
    .filter(([c]) => c).map(([c, what]) => `${c} ${what}${c > 1 ? "s" : ""}`);
  const kernel = launches.length ? D.plan.launches[launches[0]].symbol.replace(/^\w+\./, "") : "";
  const last = kernel ? `▸ ${kernel}${launches.length > 1 ? ` +${launches.length - 1}` : ""}` : reads.join(", ") || "no weights";
  const out = n.names.some((v) => leaving.has(v));
  return svg("g", { class: `box ${mark} ${state.node === n.names[0] ? "here" : ""}`, tabindex: 0, role: "button",
    "aria-label": `${mark ? mark + " " : ""}${n.op}, gives ${n.names.join(", ")}`, "data-name": n.names[0],
    onclick: () => openNode(r, k), onkeydown: (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); openNode(r, k); } } },
    svg("rect", { class: "frame", width: BOX_W, height: BOX_H, rx: 6 }),
    svg("rect", { class: `f-${familyOf(n.op)}`, width: 6, height: BOX_H, rx: 3 }),
    svg("text", { class: "op", x: 14, y: 19 }, short(n.op, 22)),
    mark ? svg("text", { class: "mark", x: BOX_W - 20, y: 20 }, MARKS[mark]) : null,
    out && !mark ? svg("text", { class: "dim", x: BOX_W - 22, y: 19 }, "↓") : null,
    svg("text", { x: 14, y: 37 }, short(relative(n.names[0], module), n.names.length > 1 ? 27 : 30) + (n.names.length > 1 ? ` +${n.names.length - 1}` : "")),
    svg("text", { class: "dim", x: 14, y: 55 }, short(n.types[0], 21)),
    svg("text", { class: "dim", x: 14, y: 73 }, short(last, 31)),
    svg("text", { class: "dim", x: BOX_W - 8, y: 55, "text-anchor": "end" }, bytes(n.bytes)),
    svg("title", null, `${n.op}\n${n.names.map((v, i) => `${v} : ${n.types[i]}`).join("\n")}${out ? "\n↓ read outside of this module" : ""}`));
}

function outsideBox(value, k, module) {
  const maker = indexOf(k).makers.get(value), n = nodeOf(maker);
  const type = n.types[n.names.indexOf(value)];
  const go = () => { setState({ module: n.module || ROOT, node: n.names[0], snapshot: k, tab: "graph" }); };
  return svg("g", { class: "box outside", tabindex: 0, role: "button", "aria-label": `from outside: ${value}`, onclick: go,
    onkeydown: (e) => { if (e.key === "Enter") go(); } },
    svg("rect", { class: "frame", width: BOX_W, height: BOX_H, rx: 30 }),
    svg("text", { class: "dim", x: 24, y: 22 }, `from ${short(n.module || "the root", 26)}`),
    svg("text", { x: 24, y: 42 }, short(value.split(".").slice(-2).join("."), 28)),
    svg("text", { class: "dim", x: 24, y: 61 }, short(type, 28)),
    svg("title", null, `${value} : ${type}\nmade by ${n.op} outside of ${module}`));
}

/** Arrow keys: up and down along the lines, left and right within the row. */
function walk(e, i, layout, boxes) {
  const [x, y] = layout.boxes[i];
  let to;
  if (e.key === "ArrowUp") to = layout.lines.filter((l) => l[1] === i).map((l) => l[0])[0];
  if (e.key === "ArrowDown") to = layout.lines.filter((l) => l[0] === i).map((l) => l[1])[0];
  if (e.key === "ArrowLeft" || e.key === "ArrowRight") {
    const way = e.key === "ArrowLeft" ? -1 : 1;
    const row = layout.boxes.map(([bx, by], j) => [bx, by, j]).filter(([bx, by]) => by === y && (bx - x) * way > 0);
    to = (row.sort((a, b) => (a[0] - b[0]) * way)[0] || [])[2];
  }
  if (to !== undefined) { e.preventDefault(); boxes[to].focus(); boxes[to].scrollIntoView({ block: "nearest", inline: "nearest" }); }
}

const familyLegend = () => el("div", { class: "legend" }, FAMILIES.map(([name, text]) => el("span", null, el("i", { class: `f-${name}` }), text)));
const markLegend = () => el("div", { class: "legend" },
  el("span", null, el("b", { class: "minus" }, "− "), "dashed: gone"), el("span", null, el("b", { class: "plus" }, "+ "), "thick: new"),
  el("span", null, el("b", { class: "tilde" }, "~ "), "dotted: other operands, type or attributes"));
