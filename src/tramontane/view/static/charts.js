// The charts of some runs: which charts there are, and what they show.

import { clock } from "./dom.js";
import { Chart } from "./chart.js";

const COLORS = ["var(--run0)", "var(--run1)", "var(--run2)", "var(--run3)", "var(--run4)", "var(--run5)"];
const HELD_OUT = "held_out";

const rowsOf = (run) => [...run.tail.rows.values()].sort((a, b) => a.update - b.update);

// Names of the metrics that at least one update has.
export function metricsOf(runs) {
  return new Set(runs.flatMap((run) => [...run.tail.rows.values()].flatMap((row) =>
    Object.keys(row).filter((name) => typeof row[name] === "number" || name.endsWith("_histogram")))));
}

// [title, charts] of each section: those of `specs`, and one for each further metric. With several
// runs, each metric has its own chart, with a line for each run.
export function sections(runs, specs) {
  const names = metricsOf(runs);
  const used = new Set(["update", "wall_seconds", ...specs.flatMap(({ charts }) => charts.flatMap((spec) => Object.keys(spec.keys)))]);
  const found = specs.map(({ title, charts }) => [title, charts.flatMap((spec) => {
    const more = [...names].filter((name) => spec.prefix && name.startsWith(spec.prefix) && !used.has(name));
    more.forEach((name) => used.add(name));
    const keys = [...Object.entries(spec.keys).filter(([name]) => names.has(name)), ...more.map((name) => [name, name.slice(spec.prefix.length)])];
    return made(spec, keys, runs);
  })]);
  const evaluated = [...new Set(runs.flatMap(({ tail }) => tail.evaluations.filter((e) => e.pass_at_1).map(setOf)))]
    .filter((set) => set !== HELD_OUT || !found[0][1].some(({ evaluations }) => evaluations));
  found[0][1].unshift(...evaluated.map((set) => ({
    set, chart: new Chart({ title: set === HELD_OUT ? "pass@1, held-out" : `pass@1, ${set}`, unit: "with 95 % intervals", percent: true, legend: true }),
  })));
  const others = [...names].filter((name) => !used.has(name)).sort();
  found.push(["Other metrics", others.flatMap((name) => made({ title: name.replaceAll("_", " "), unit: "", from_zero: false }, [[name, name]], runs))]);
  return found.filter(([, charts]) => charts.length);
}

const setOf = (evaluation) => evaluation.set || HELD_OUT;

function made(spec, keys, runs) {
  if (!keys.length) return [];
  if (runs.length === 1) {
    const evaluations = spec.evaluated && runs[0].tail.evaluations.some((e) => e.pass_at_1 && setOf(e) === HELD_OUT);
    return [{ chart: new Chart({ ...spec, legend: Boolean(spec.prefix), note: evaluations || !spec.evaluated ? spec.note : "" }), keys, evaluations }];
  }
  const kind = spec.kind === "bars" ? "lines" : spec.kind;
  return keys.map(([name, label]) => ({
    chart: new Chart({ ...spec, kind, note: "", title: keys.length > 1 ? `${spec.title}: ${label}` : spec.title }), keys: [[name, label]],
  }));
}

// Fill charts with what the runs have recorded.
export function fill(charts, runs, { time = false, smooth = 0 } = {}) {
  const xFormat = time ? (x) => clock(60 * x) : (x) => String(Math.round(x * 100) / 100);
  const view = { smooth, xLabel: time ? "after" : "update", xFormat };
  const single = runs.length === 1;
  const rows = new Map(runs.map((run) => [run.run, rowsOf(run)]));
  for (const { chart, keys, set, evaluations } of charts) {
    if (set) { chart.set(runs.map((run) => evaluated(run, set, time, rows.get(run.run))), { ...view, smooth: 0 }); continue; }
    const series = runs.flatMap((run) => keys.map(([name, label], i) => ({
      name: single ? label : run.label,
      color: single && keys.length > 1 ? COLORS[i % COLORS.length] : run.color,
      points: chart.options.kind === "histogram" ? shares(rows.get(run.run), name)
        : rows.get(run.run).filter((row) => typeof row[name] === "number").map((row) => [time ? row.wall_seconds / 60 : row.update, row[name]]),
    })));
    if (evaluations) series.push({ ...evaluated(runs[0], HELD_OUT, time, rows.get(runs[0].run)), name: "evaluation", color: COLORS[1] });
    chart.set(series, chart.options.kind === "histogram" ? { xLabel: "update", xFormat: String } : view);
  }
}

// For each number, its share of all counts.
function shares(rows, name) {
  const counts = new Map();
  for (const row of rows) {
    for (const [at, count] of Object.entries(row[name] || {})) counts.set(+at, (counts.get(+at) || 0) + count);
  }
  const total = [...counts.values()].reduce((a, b) => a + b, 0);
  const last = Math.max(...counts.keys());
  return total ? Array.from({ length: last + 1 }, (_, at) => [at, (counts.get(at) || 0) / total]) : [];
}

function evaluated(run, set, time, rows) {
  const seconds = new Map(rows.map((row) => [row.update, row.wall_seconds / 60]));
  const last = rows.length ? rows[rows.length - 1].update : 0;
  const marks = run.tail.evaluations.filter((e) => setOf(e) === set && e.pass_at_1).map((e) => {
    const update = e.version ?? (e.when === "after" ? last : 0);
    return [time ? seconds.get(update) ?? 0 : update, e.pass_at_1.value, e.pass_at_1.low, e.pass_at_1.high];
  });
  return { name: run.label, color: run.color, marks };
}
