/* Small helpers: elements, numbers, names. */
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

/** An element: el("td", {class: "n", onclick: f}, "text", child, ...). */
function el(tag, attrs, ...children) { return fill(document.createElement(tag), attrs, children); }
function svg(tag, attrs, ...children) { return fill(document.createElementNS(SVG, tag), attrs, children); }
function fill(element, attrs, children) {
  for (const [key, value] of Object.entries(attrs || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(3)) if (child !== null && child !== undefined && child !== false) element.append(child);
  return element;
}

const count = (n) => Math.round(n).toLocaleString("en-US");
/** Bytes, short: 12.3 kB. The exact number belongs into a title. */
function bytes(n) {
  const sign = n < 0 ? "−" : "";
  let x = Math.abs(n);
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (x < 999.5 || unit === "TB") return sign + (unit === "B" ? count(x) : x.toPrecision(3)) + " " + unit;
    x /= 1000;
  }
}
const bytesCell = (n) => el("td", { class: "n", title: count(n) + " bytes" }, n === 0 ? "–" : bytes(n));
const relative = (name, module) => (module && name.startsWith(module + ".") ? name.slice(module.length + 1) : name);
/** Text of at most `most` characters, the middle left out. */
function short(text, most) {
  if (text.length <= most) return text;
  const head = Math.ceil((most - 1) / 2);
  return text.slice(0, head) + "…" + text.slice(text.length - (most - 1 - head));
}
/** Ascending numbers, short: 1–4, 6, 8 … 42. */
function ranges(numbers) {
  const parts = [];
  for (let i = 0; i < numbers.length;) {
    const step = i + 1 < numbers.length ? numbers[i + 1] - numbers[i] : 0;
    let j = i;
    while (j + 1 < numbers.length && numbers[j + 1] - numbers[j] === step) j += 1;
    if (step === 1 && j - i > 1) { parts.push(`${numbers[i]}–${numbers[j]}`); i = j + 1; }
    else if (j - i > 2) { parts.push(`${numbers[i]}, ${numbers[i + 1]} … ${numbers[j]}`); i = j + 1; }
    else { parts.push(String(numbers[i])); i += 1; }
  }
  return parts.join(", ");
}
const layerOf = (text) => { const found = /\blayers\.(\d+)\b/.exec(text); return found ? Number(found[1]) : null; };
/** " (same in layers 2, 4 … 42)" of things at these places. */
function alsoIn(texts) {
  const layers = texts.map(layerOf).filter((n) => n !== null).sort((a, b) => a - b);
  return layers.length ? ` · same in layer${layers.length > 1 ? "s" : ""} ${ranges(layers)}` : "";
}
function table(head, rows, attrs) {
  const cells = head.map((h) => (Array.isArray(h) ? el("th", { class: "n", scope: "col" }, h[0]) : el("th", { scope: "col" }, h)));
  return el("table", attrs, el("thead", null, el("tr", null, cells)), el("tbody", null, rows));
}
/** A row that does something when it is clicked or Enter is pressed. */
function pickRow(action, attrs, ...cells) {
  return el("tr", { class: "pick", tabindex: 0, ...attrs, onclick: action,
    onkeydown: (e) => { if (e.key === "Enter") action(); } }, cells);
}
