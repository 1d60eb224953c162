// Charts and tables as files: SVG, PNG, CSV and Markdown.

import { h, svg } from "./dom.js";

const SCALE = 2; // pixels of a PNG for each of the page's
const MARGIN = 14, LINE = 18;
const FONT = "12px system-ui, sans-serif";

export function save(name, type, content) {
  const link = h("a", { href: URL.createObjectURL(new Blob([content], { type })), download: name.replace(/[^\w.+=-]+/g, "_") });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
const plain = (value) => (value === null || value === undefined ? "" : quoted(String(value)));

export const csv = (rows) => rows.map((row) => row.map(plain).join(",")).join("\n") + "\n";

export function markdown([header, ...rows]) {
  const line = (cells) => `| ${cells.map((cell) => String(cell ?? "").replaceAll("|", "\\|").replace(/\s+/g, " ")).join(" | ")} |\n`;
  return line(header) + line(header.map(() => "---")) + rows.map(line).join("");
}

// Rows of a chart's values: x, and of each series its value and, with an interval, its ends.
export function values(chart) {
  const wide = (s) => (s.points || s.marks).some((point) => point.length > 2);
  const at = chart.series.map((s) => new Map((s.points || s.marks).map(([x, ...ys]) => [x, ys])));
  const header = [chart.over, ...chart.series.flatMap((s) => (wide(s) ? [s.name, `${s.name} low`, `${s.name} high`] : [s.name]))];
  const xs = [...new Set(at.flatMap((found) => [...found.keys()]))].sort((a, b) => a - b);
  return [header, ...xs.map((x) => [x, ...chart.series.flatMap((s, i) => {
    const ys = at[i].get(x) || [];
    return wide(s) ? [ys[0], ys[1], ys[2]] : [ys[0]];
  })])];
}

// What stands around the curves of a chart: title, legend with colors, size of the plot.
function frame(chart) {
  const { width, height } = chart.size();
  const title = [chart.options.title, chart.options.unit].filter(Boolean).join(", ");
  const legend = chart.series.length > 1 ? chart.series.map((s) => [s.name, chart.color(s.color)]) : [];
  const top = MARGIN + LINE * (1 + legend.length);
  return { title, legend, top, width: width + 2 * MARGIN, height: top + height + MARGIN, paper: chart.color("var(--card)"), ink: chart.color("var(--ink)"), muted: chart.color("var(--muted)") };
}

export function asPng(chart) {
  const { title, legend, top, width, height, paper, ink, muted } = frame(chart);
  const canvas = h("canvas", { width: SCALE * width, height: SCALE * height }), ctx = canvas.getContext("2d");
  ctx.scale(SCALE, SCALE);
  ctx.fillStyle = paper;
  ctx.fillRect(0, 0, width, height);
  ctx.font = `600 ${FONT}`;
  ctx.fillStyle = ink;
  ctx.fillText(title, MARGIN, MARGIN + 10);
  ctx.font = FONT;
  legend.forEach(([name, color], i) => {
    const y = MARGIN + 10 + LINE * (i + 1);
    ctx.fillStyle = color;
    ctx.fillRect(MARGIN, y - 6, 14, 3);
    ctx.fillStyle = muted;
    ctx.fillText(name, MARGIN + 20, y);
  });
  const plot = chart.plot.ctx.canvas, size = chart.size();
  ctx.drawImage(plot, MARGIN, top, size.width, size.height);
  canvas.toBlob((blob) => save(`${title}.png`, "image/png", blob));
}

// The curves as vectors, at the places where the chart has them.
export function asSvg(chart) {
  const { title, legend, top, width, height, paper, ink, muted } = frame(chart);
  const u = chart.plot, line = chart.color("var(--line)");
  const X = (x) => u.valToPos(x, "x") + u.over.offsetLeft, Y = (y) => u.valToPos(y, "y") + u.over.offsetTop;
  const [left, right] = [u.over.offsetLeft, u.over.offsetLeft + u.over.clientWidth];
  const bottom = u.over.offsetTop + u.over.clientHeight;
  const write = (x, y, content, props) => svg("text", { x, y, fill: muted, "font-size": 12, "font-family": "system-ui, sans-serif", ...props }, content);
  const marks = (axis) => u.axes[axis]._splits.map((at, i) => [at, (u.axes[axis]._values || [])[i]]).filter(([, label]) => label !== null && label !== "" && label !== undefined);
  const visible = ([x, y]) => Number.isFinite(y) && (!chart.options.log || y > 0) && x >= u.scales.x.min && x <= u.scales.x.max;
  const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`).join("");
  const curves = chart.series.flatMap((s) => {
    const color = chart.color(s.color), points = (s.points || s.marks).filter(visible);
    if (!points.length) return [];
    const ends = points.filter((point) => point.length > 2 && Number.isFinite(point[2]));
    if (s.marks) {
      return points.flatMap(([x, y, low, high]) => [svg("line", { x1: X(x), x2: X(x), y1: Y(low), y2: Y(high), stroke: color, "stroke-width": 1.5 }), svg("circle", { cx: X(x), cy: Y(y), r: 3.2, fill: color })]);
    }
    const band = ends.length > 1 ? svg("path", { d: `${path(ends.map(([x, , low]) => [x, low]))}${path(ends.map(([x, , , high]) => [x, high]).reverse()).replace("M", "L")}Z`, fill: color, opacity: 0.18, "clip-path": "url(#plot)" }) : null;
    return [band, svg("path", { d: path(points), fill: "none", stroke: color, "stroke-width": 1.8, "stroke-linejoin": "round" })];
  });
  const picture = svg("svg", { xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${width} ${height}`, width, height },
    svg("rect", { width, height, fill: paper }), write(MARGIN, MARGIN + 10, title, { fill: ink, "font-weight": 600 }),
    legend.map(([name, color], i) => [svg("rect", { x: MARGIN, y: MARGIN + 4 + LINE * (i + 1), width: 14, height: 3, fill: color }), write(MARGIN + 20, MARGIN + 10 + LINE * (i + 1), name)]),
    svg("clipPath", { id: "plot" }, svg("rect", { x: left, y: u.over.offsetTop, width: right - left, height: u.over.clientHeight })), // as on the page
    svg("g", { transform: `translate(${MARGIN} ${top})` },
      marks(1).map(([y, label]) => [svg("line", { x1: left, x2: right, y1: Y(y), y2: Y(y), stroke: line }), write(left - 6, Y(y) + 4, label, { "text-anchor": "end" })]),
      marks(0).map(([x, label]) => write(X(x), bottom + 16, label, { "text-anchor": "middle" })),
      write((left + right) / 2, bottom + 34, chart.over, { "text-anchor": "middle" }), curves));
  save(`${title}.svg`, "image/svg+xml", new XMLSerializer().serializeToString(picture));
}

// A menu of a chart's files.
export function menu(chart) {
  const item = (name, act) => h("button", { type: "button", class: "quiet", onclick: (event) => { act(); event.target.closest("details").open = false; } }, name);
  return h("details", { class: "save" }, h("summary", { title: "Save this chart", "aria-label": `Save the chart ${chart.options.title}` }, "⤓"),
    h("div", {}, item("SVG", () => asSvg(chart)), item("PNG", () => asPng(chart)), item("CSV", () => save(`${chart.options.title}.csv`, "text/csv", csv(values(chart))))));
}
