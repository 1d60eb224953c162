// A chart of several series, drawn by uPlot, with a legend and the values at a cursor.

import { h, replace, number } from "./dom.js";
import { menu } from "./export.js";

const FONT = "11px system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif";
const MOST_NAMED = 12; // series, in a legend
const CHARACTER = 6.4; // width of one, about
const WHOLE = [0, 1, 2, 3, 4, 5].flatMap((power) => [1, 2, 5].map((n) => n * 10 ** power)); // between two updates

function smoothed(ys, weight) {
  let mean = 0, total = 0;
  return ys.map((y) => {
    mean = weight * mean + (1 - weight) * y; // corrected below for the bias of the first points
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

// Ticks of a logarithmic axis: powers of ten, or all if fewer than two are in view.
function powers(ys) {
  const found = ys.map((y) => (Number.isInteger(+Math.log10(y).toFixed(6)) ? y : null));
  return found.filter((y) => y !== null).length > 1 ? found : ys;
}

// A tick of a linear axis: of small values, all in the same form.
function tick(y) {
  return Math.abs(y) >= 1e-5 && Math.abs(y) < 1e-2 ? String(+y.toPrecision(3)) : number(y, 4);
}

// options: title, unit, note, percent, log, from_zero, kind, evaluated; series: name, color, points [[x, y]],
// or [[x, y, low, high]] with a band, or marks [[x, y, low, high]], with intervals.
export class Chart {
  constructor(options) {
    this.options = options;
    this.series = [];
    this.view = { smooth: 0, xLabel: "update", xFormat: (x) => number(x, 2) };
    this.box = h("div", { class: "plot", role: "img" });
    this.colors = h("span", { hidden: true });
    this.readout = h("div", { class: "readout", "aria-live": "off" });
    this.legend = h("div", { class: "legend" });
    this.element = h("figure", {
      class: "chart", tabindex: 0, onkeydown: (event) => this.key(event), onblur: () => this.point(null),
    },
    h("figcaption", {}, h("h3", {}, options.title), options.unit ? h("span", { class: "unit" }, options.unit) : null, menu(this)),
    this.legend, this.box, this.colors, options.note ? h("p", { class: "note" }, options.note) : null, this.readout);
    this.ended = new AbortController();
    const repaint = () => this.plot && this.plot.redraw();
    document.addEventListener("themed", repaint, { signal: this.ended.signal });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint, { signal: this.ended.signal });
    this.observer = new ResizeObserver(() => this.plot && this.plot.setSize(this.size()));
    this.observer.observe(this.box);
  }

  set(series, view) {
    this.series = series.filter((s) => (s.points || s.marks).length);
    Object.assign(this.view, view || {});
    this.element.hidden = !this.series.length;
    if (!this.series.length) return;
    const zoomed = this.plot && this.plot.zoomed, before = this.plot && { ...this.plot.scales.x };
    if (this.plot) this.plot.destroy();
    const data = this.aligned();
    this.plot = this.element.uplot = new uPlot(this.described(), data, this.box);
    if (zoomed) this.plot.setScale("x", { min: before.min, max: before.max });
    const last = this.series.map((s) => `${s.name} ${this.format((s.points || s.marks).at(-1)[1])}`);
    this.box.setAttribute("aria-label", `${this.options.title}; last values: ${last.join(", ")}`);
    replace(this.legend, this.series.length > MOST_NAMED ? [] : this.series.length > 1 || this.options.legend
      ? this.series.map((s) => h("span", { vars: { "--c": s.color } }, h("i", {}), s.name)) : []);
    replace(this.readout);
  }

  // One column for x and one or two for each series, as uPlot wants them.
  aligned() {
    const positive = (y) => (Number.isFinite(y) && (!this.options.log || y > 0) ? y : null);
    const tables = this.series.map((s) => {
      const points = s.points || s.marks;
      const ys = points.map(([, y]) => positive(y));
      const band = this.banded(s) ? [2, 3].map((end) => points.map((point) => positive(point[end] ?? point[1]))) : [];
      return [points.map(([x]) => x), ys, ...(this.smooths(s) ? [smoothed(ys, this.view.smooth)] : []), ...band];
    });
    const data = uPlot.join(tables);
    this.xs = data[0];
    if (!this.bars) return data;
    // Each bar is stacked on those before it, so the last is drawn first.
    for (let i = 2; i < data.length; i++) data[i] = data[i].map((y, at) => (y || 0) + (data[i - 1][at] || 0));
    this.top = Math.max(...data.at(-1));
    return [data[0], ...data.slice(1).reverse()];
  }

  banded(s) { return !this.bars && Boolean(s.points && s.points.some((point) => point.length > 2)); }
  smooths(s) { return this.view.smooth > 0 && s.points && !this.bars; }
  get over() { return this.histogram ? "versions old" : this.view.xLabel; }
  get histogram() { return this.options.kind === "histogram"; }
  get bars() { return this.options.kind === "bars" || (this.histogram && this.series.length === 1); } // of several runs: lines
  size() { return { width: Math.max(200, this.box.clientWidth), height: this.box.clientHeight }; }

  color(name) { // what a canvas understands
    this.colors.style.color = name;
    return getComputedStyle(this.colors).color;
  }

  format(y) {
    return this.options.percent ? `${number(100 * y, 1)} %` : number(y, 3);
  }

  described() {
    const { options, view } = this;
    const bars = this.bars ? uPlot.paths.bars({ size: [0.8, 70] }) : undefined;
    const muted = () => this.color("var(--muted)");
    const filtered = options.log ? { filter: (u, ys) => powers(ys) } : {};
    const grid = { stroke: () => this.color("var(--line)"), width: 1, ...filtered };
    const axis = { stroke: muted, font: FONT, labelFont: FONT, ticks: { show: false } };
    const lines = this.series.flatMap((s) => {
      const stroke = () => this.color(s.color);
      const faint = () => this.color(`color-mix(in oklab, ${s.color} 28%, transparent)`);
      const shape = { spanGaps: true, points: { show: ((s.points || s.marks).length === 1 || this.histogram) && !this.bars, size: 6, fill: stroke } };
      if (s.marks) return [{ ...shape, stroke, paths: () => null, points: { show: false } }];
      if (this.bars) return [{ ...shape, stroke, fill: stroke, width: 0, paths: bars }];
      const found = this.smooths(s) ? [{ ...shape, stroke: faint, width: 1 }, { ...shape, stroke, width: 1.8 }] : [{ ...shape, stroke, width: 1.8 }];
      const end = { ...shape, points: { show: false }, stroke, width: 0 };
      return this.banded(s) ? [...found, end, end] : found;
    });
    const bands = [];
    let place = 1;
    for (const s of this.series) {
      place += 1 + this.smooths(s);
      if (!this.banded(s)) continue;
      bands.push({ series: [place + 1, place], fill: () => this.color(`color-mix(in oklab, ${s.color} 18%, transparent)`) });
      place += 2;
    }
    const whole = view.xLabel === "update" ? { incrs: WHOLE } : {};
    const lone = this.xs.length === 1 ? { splits: () => this.xs } : {}; // one point stands in the middle
    return {
      ...this.size(),
      padding: [10, 10, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: !this.bars, y: false }, points: { show: !this.bars, size: 7 } },
      scales: {
        x: { time: false, range: (u, min, max) => (this.bars ? [min - 0.6, max + 0.6] : min === max ? [min - 0.5, max + 0.5] : [min, max]) },
        y: options.log ? { distr: 3 } : { range: () => this.heights() },
      },
      axes: [
        { ...axis, ...whole, ...lone, grid: { show: false }, size: 24, gap: 4, space: 55, label: this.over, labelSize: 16, labelGap: -2,
          values: (u, xs) => xs.map((x) => view.xFormat(x)) },
        { ...axis, ...filtered, grid, gap: 6, space: 27, size: (u, texts) => (texts ? Math.max(30, 14 + CHARACTER * Math.max(...texts.map((text) => text.length))) : 40),
          values: (u, ys) => ys.map((y) => (y === null ? "" : options.log ? y.toExponential(0) : options.percent ? `${number(100 * y, 1)}%` : tick(y))) },
      ],
      bands,
      series: [{}, ...(this.bars ? lines.reverse() : lines)],
      hooks: {
        draw: [(u) => this.intervals(u)],
        setCursor: [(u) => this.read(u)],
        setSelect: [(u) => { u.zoomed = u.select.width > 0; }],
      },
    };
  }

  // The ends of the axis, with intervals, and bands as far as the lines are apart; bars stand on 0.
  heights() {
    if (this.options.evaluated) return [0, 1.03];
    if (this.bars) return [0, 1.12 * this.top || 1];
    let [low, high] = [Infinity, -Infinity];
    const add = (y) => { if (Number.isFinite(y)) { low = Math.min(low, y); high = Math.max(high, y); } };
    for (const s of this.series) (s.marks || s.points).forEach(([, y, ...ends]) => [y, ...(s.marks ? ends : [])].forEach(add));
    // A band over two or three seeds may be ten times as wide as the lines are apart: it is cut.
    const apart = high - low || Infinity, [least, most] = [low - apart, high + apart];
    for (const s of this.series) if (this.banded(s)) for (const [, , from, to] of s.points) [Math.max(least, from), Math.min(most, to)].forEach(add);
    if (this.options.from_zero !== false && low > 0 && low < 0.6 * high) low = 0;
    const pad = (high - low || Math.abs(high) || 1) * 0.06;
    return [low === 0 ? 0 : low - pad, high + pad];
  }

  intervals(u) {
    const { ctx } = u, scale = devicePixelRatio;
    const X = (x) => u.valToPos(x, "x", true), Y = (y) => u.valToPos(y, "y", true);
    ctx.save();
    for (const s of this.series.filter((one) => one.marks)) {
      ctx.strokeStyle = ctx.fillStyle = this.color(s.color);
      ctx.lineWidth = 1.5 * scale;
      for (const [x, y, low, high] of s.marks) {
        if (x < u.scales.x.min || x > u.scales.x.max) continue;
        ctx.beginPath();
        for (const end of [low, high]) { ctx.moveTo(X(x) - 4 * scale, Y(end)); ctx.lineTo(X(x) + 4 * scale, Y(end)); }
        ctx.moveTo(X(x), Y(low)); ctx.lineTo(X(x), Y(high));
        ctx.stroke();
        ctx.beginPath();
        ctx.arc(X(x), Y(y), 3.2 * scale, 0, 2 * Math.PI);
        ctx.fill();
      }
    }
    if (this.histogram && this.bars) {
      ctx.fillStyle = this.color("var(--ink)");
      ctx.font = FONT.replace("11px", `${11 * scale}px`);
      ctx.textAlign = "center";
      for (const [x, y] of this.series[0].points) ctx.fillText(this.format(y), X(x), Y(y) - 4 * scale);
    }
    ctx.restore();
  }

  key(event) {
    if (!this.plot) return;
    const at = this.plot.cursor.idx, last = this.xs.length - 1, none = at === null || at === undefined;
    const next = { ArrowRight: none ? 0 : at + 1, ArrowLeft: none ? last : at - 1, Home: 0, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    this.readout.setAttribute("aria-live", "polite");
    this.point(Math.min(last, Math.max(0, next)));
  }

  point(place) {
    if (!this.plot) return;
    if (place === null) this.plot.setCursor({ left: -10, top: -10 });
    else this.plot.setCursor({ left: this.plot.valToPos(this.xs[place], "x"), top: 10 });
  }

  read(u) {
    replace(this.readout);
    if (u.cursor.idx === null || u.cursor.idx === undefined || u.cursor.left < 0) return;
    const x = this.xs[u.cursor.idx];
    const values = this.series.slice(0, MOST_NAMED).map((s) => {
      const points = s.points || s.marks;
      const found = points.find(([at]) => at === x);
      if (!found || !Number.isFinite(found[1])) return null;
      const interval = found.length > 2 ? ` (${this.format(found[2])} to ${this.format(found[3])})` : "";
      return h("span", { vars: { "--c": s.color } }, h("i", {}), `${s.name} `, h("b", {}, this.format(found[1])), interval);
    });
    replace(this.readout, h("span", { class: "x" }, `${this.over} ${this.view.xFormat(x)}`), values);
  }

  close() {
    this.ended.abort();
    this.observer.disconnect();
    if (this.plot) this.plot.destroy();
  }
}
