// A line chart of several series, with a cursor for pointer and keyboard.

import { h, svg, replace, number } from "./dom.js";

const HEIGHT = 190;
const EDGE = { left: 48, right: 10, top: 8, bottom: 24 };

function ticks(low, high, count) {
  const span = high - low || 1;
  const raw = span / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let x = Math.ceil(low / step) * step; x <= high + step * 1e-9; x += step) found.push(Math.abs(x) < step * 1e-9 ? 0 : x);
  return found;
}

function smoothed(points, weight) {
  if (!weight) return points;
  let mean = 0, total = 0;
  return points.map(([x, y]) => {
    mean = weight * mean + (1 - weight) * y; // with the bias of the first points taken out
    total = weight * total + (1 - weight);
    return [x, mean / total];
  });
}

// At most two points a pixel: the lowest and the highest.
function thinned(points, width) {
  if (points.length <= 2 * width) return points;
  const found = [];
  const size = points.length / width;
  for (let i = 0; i < width; i++) {
    const part = points.slice(Math.floor(i * size), Math.floor((i + 1) * size));
    if (!part.length) continue;
    let low = part[0], high = part[0];
    for (const point of part) {
      if (point[1] < low[1]) low = point;
      if (point[1] > high[1]) high = point;
    }
    found.push(...(low[0] <= high[0] ? [low, high] : [high, low]));
  }
  return found;
}

// options: title, unit, note, percent, log, fromZero; series: name, colour, points [[x, y]],
// and marks [[x, y, low, high]] with intervals.
export class Chart {
  constructor(options) {
    this.options = options;
    this.series = [];
    this.view = { smooth: 0, xLabel: "update", xFormat: (x) => number(x, 2) };
    this.cursor = null;
    this.plot = svg("svg", { height: HEIGHT, role: "img", focusable: "false" });
    this.readout = h("div", { class: "readout", "aria-live": "off" });
    this.legend = h("div", { class: "legend" });
    this.element = h("figure", {
      class: "chart", tabindex: 0, onkeydown: (event) => this.key(event),
      onblur: () => this.point(null),
    },
    h("figcaption", {}, h("h3", {}, options.title), options.unit ? h("span", { class: "unit" }, options.unit) : null),
    this.plot, this.legend, this.readout,
    options.note ? h("p", { class: "note" }, options.note) : null);
    this.plot.addEventListener("pointermove", (event) => this.hover(event));
    this.plot.addEventListener("pointerleave", () => this.point(null));
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.element);
  }

  set(series, view) {
    this.series = series;
    Object.assign(this.view, view || {});
    this.draw();
  }

  format(y) {
    return this.options.percent ? `${number(100 * y, 1)} %` : number(y, 3);
  }

  scales(width) {
    const all = this.series.flatMap((s) => [...s.points, ...(s.marks || []).flatMap(([x, y, low, high]) => [[x, low], [x, high]])])
      .filter(([, y]) => Number.isFinite(y) && (!this.options.log || y > 0));
    if (!all.length) return null;
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const [x, y] of all) {
      x0 = Math.min(x0, x); x1 = Math.max(x1, x); y0 = Math.min(y0, y); y1 = Math.max(y1, y);
    }
    const only = x0 === x1 ? x0 : null; // a lone point stands in the middle
    if (only !== null) { x0 -= 0.5; x1 += 0.5; }
    const log = this.options.log;
    if (log) { y0 = Math.log10(y0); y1 = Math.log10(y1); }
    else if (this.options.fromZero !== false && y0 > 0 && y0 < 0.6 * y1) y0 = 0;
    const pad = (y1 - y0 || Math.abs(y1) || 1) * 0.06;
    if (y0 !== 0) y0 -= pad;
    y1 += pad;
    const right = width - EDGE.right, bottom = HEIGHT - EDGE.bottom;
    const X = (x) => EDGE.left + ((x - x0) / (x1 - x0)) * (right - EDGE.left);
    const Y = (y) => bottom - (((log ? Math.log10(y) : y) - y0) / (y1 - y0)) * (bottom - EDGE.top);
    return { X, Y, x0, x1, y0, y1, right, bottom, log, only };
  }

  draw() {
    const width = Math.max(200, this.element.clientWidth - 24);
    this.plot.setAttribute("width", width);
    this.plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const at = this.at = this.scales(width);
    if (!at) { replace(this.plot); this.element.hidden = true; return; }
    this.element.hidden = false;
    const grid = svg("g", { class: "grid" });
    const yTicks = at.log
      ? Array.from({ length: Math.floor(at.y1) - Math.ceil(at.y0) + 1 }, (_, i) => 10 ** (Math.ceil(at.y0) + i))
      : ticks(at.y0, at.y1, 4);
    for (const y of yTicks.length ? yTicks : [10 ** at.y0]) {
      const place = at.Y(y);
      grid.append(svg("line", { x1: EDGE.left, x2: at.right, y1: place, y2: place }),
        svg("text", { x: EDGE.left - 6, y: place + 4, "text-anchor": "end" }, this.options.percent ? `${number(100 * y, 1)}%` : at.log ? y.toExponential(0) : number(y, 4)));
    }
    for (const x of at.only !== null ? [at.only] : ticks(at.x0, at.x1, Math.max(2, width / 90))) {
      grid.append(svg("text", { x: at.X(x), y: HEIGHT - 6, "text-anchor": "middle" }, this.view.xFormat(x)));
    }
    const lines = this.series.map((s) => this.line(s, width));
    this.pointer = svg("g", { class: "cursor" });
    replace(this.plot, grid, lines, this.pointer);
    const last = this.series.filter((s) => s.points.length)
      .map((s) => `${s.name} ${this.format(s.points[s.points.length - 1][1])}`);
    this.plot.setAttribute("aria-label", `${this.options.title}; last values: ${last.join(", ")}`);
    replace(this.legend, this.series.length > 1 || this.options.legend
      ? this.series.map((s) => h("span", { vars: { "--c": s.colour } }, h("i", {}), s.name)) : []);
    this.point(this.cursor);
  }

  line(s, width) {
    const usable = s.points.filter(([, y]) => Number.isFinite(y) && (!this.at.log || y > 0));
    const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${this.at.X(x).toFixed(1)} ${this.at.Y(y).toFixed(1)}`).join("");
    const group = svg("g", { class: "series", vars: { "--c": s.colour } });
    if (this.view.smooth) group.append(svg("path", { class: "raw", d: path(thinned(usable, width)) }));
    group.append(svg("path", { d: path(thinned(smoothed(usable, this.view.smooth), width)) }));
    if (usable.length === 1) group.append(svg("circle", { r: 3, cx: this.at.X(usable[0][0]), cy: this.at.Y(usable[0][1]) }));
    for (const [x, y, low, high] of s.marks || []) {
      const X = this.at.X(x);
      const [top, bottom] = [this.at.Y(high), this.at.Y(low)];
      group.append(svg("line", { x1: X, x2: X, y1: bottom, y2: top }), svg("line", { x1: X - 4, x2: X + 4, y1: top, y2: top }),
        svg("line", { x1: X - 4, x2: X + 4, y1: bottom, y2: bottom }), svg("circle", { r: 2.8, cx: X, cy: this.at.Y(y) }));
    }
    return group;
  }

  xs() {
    return [...new Set(this.series.flatMap((s) => [...s.points, ...(s.marks || [])].map(([x]) => x)))].sort((a, b) => a - b);
  }

  hover(event) {
    if (!this.at) return;
    const box = this.plot.getBoundingClientRect();
    const xs = this.xs();
    const x = event.clientX - box.left;
    this.point(xs.reduce((best, c) => (Math.abs(this.at.X(c) - x) < Math.abs(this.at.X(best) - x) ? c : best), xs[0]));
  }

  key(event) {
    const xs = this.xs();
    const place = this.cursor === null ? -1 : xs.indexOf(this.cursor);
    const next = { ArrowRight: place + 1, ArrowLeft: place < 0 ? xs.length - 1 : place - 1, Home: 0, End: xs.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    this.point(xs[Math.min(xs.length - 1, Math.max(0, next))]);
    this.readout.setAttribute("aria-live", "polite");
  }

  point(x) {
    this.cursor = x;
    if (!this.pointer) return;
    replace(this.pointer);
    replace(this.readout);
    if (x === null || x === undefined || !this.at) return;
    const X = this.at.X(x);
    this.pointer.append(svg("line", { x1: X, x2: X, y1: EDGE.top, y2: this.at.bottom }));
    const values = [];
    for (const s of this.series) {
      const found = s.points.find(([at]) => at === x) || (s.marks || []).find(([at]) => at === x);
      if (!found || !Number.isFinite(found[1])) continue;
      if (!this.at.log || found[1] > 0) this.pointer.append(svg("circle", { r: 3.5, cx: X, cy: this.at.Y(found[1]), vars: { "--c": s.colour } }));
      const interval = found.length > 2 ? ` (${this.format(found[2])} to ${this.format(found[3])})` : "";
      values.push(h("span", { vars: { "--c": s.colour } }, h("i", {}), `${s.name} `, h("b", {}, this.format(found[1])), interval));
    }
    replace(this.readout, h("span", { class: "x" }, `${this.view.xLabel} ${this.view.xFormat(x)}`), values);
  }

  close() { this.observer.disconnect(); }
}
