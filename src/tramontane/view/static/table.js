// Rows of the table of runs: filtered, sorted, grouped, and as texts.

import { number, clock } from "./dom.js";

const COLORS = 8; // of runs, in the style
// 0.975 quantiles of Student's distribution by degrees of freedom, and the normal one's.
const STUDENT = [NaN, 12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.306, 2.2622, 2.2281];
const Z = 1.959964;

// Beyond the table, Cornish and Fisher's expansion: exact to four digits there.
const student = (degrees) => STUDENT[degrees] ?? Z + (Z ** 3 + Z) / (4 * degrees) + (5 * Z ** 5 + 16 * Z ** 3 + 3 * Z) / (96 * degrees ** 2);

// The mean of the numbers among some values, with Student's interval if there are several; null without any.
export function mean(found) {
  const ys = found.filter((y) => typeof y === "number" && Number.isFinite(y)), n = ys.length;
  if (!n) return null;
  const value = ys.reduce((a, b) => a + b) / n;
  if (n === 1) return { value };
  const half = student(n - 1) * Math.sqrt(ys.reduce((sum, y) => sum + (y - value) ** 2, 0) / (n - 1) / n);
  return { value, low: value - half, high: value + half };
}

// Short names of keys, where they are unique.
export function compared(keys) {
  const last = (key) => key.split(".").at(-1);
  return (key) => (keys.filter((other) => last(other) === last(key)).length > 1 ? key : last(key));
}

// A column's value of a row: of the run itself, of its results or of its config, also by a key's last part.
function column(row, name) {
  if (name === "run") return row.name;
  if (name in row && !["config", "results"].includes(name)) return row[name];
  if (name in row.results) return row.results[name].value;
  const key = name in row.config ? name : Object.keys(row.config).find((other) => other.split(".").at(-1) === name);
  return row.config[key];
}

const TESTS = {
  "=": (a, b) => (typeof a === "number" && b !== "" ? a === Number(b) : texts.value(a) === b), "!=": (a, b) => !TESTS["="](a, b),
  "<": (a, b) => a < Number(b), ">": (a, b) => a > Number(b), "<=": (a, b) => a <= Number(b), ">=": (a, b) => a >= Number(b),
};

// The rows that match all words: `column=value`, `!=`, `<`, `<=`, `>`, `>=`, or a part of any text.
export function kept(rows, filter) {
  const words = filter.split(/\s+/).filter(Boolean).map((word) => [word, /^([^=<>!]+)(<=|>=|!=|=|<|>)(.*)$/.exec(word)]);
  return rows.filter((row) => words.every(([word, found]) => {
    const given = found && column(row, found[1]);
    if (found && given !== undefined) return given !== null && TESTS[found[2]](given, found[3]);
    const all = [row.name, row.state, row.machine, ...Object.values(row.config).map(texts.value)];
    return all.some((text) => text.toLowerCase().includes(word.toLowerCase()));
  }));
}

function compare(a, b) {
  if (a === b) return 0;
  if (a === undefined || a === null) return 1; // last
  if (b === undefined || b === null) return -1;
  return typeof a === "number" && typeof b === "number" ? a - b : texts.value(a).localeCompare(texts.value(b), "en", { numeric: true });
}

export function ordered(rows, sort, down) {
  if (!sort) return rows;
  const missing = (row) => [undefined, null].includes(column(row, sort));
  return [...rows].sort((a, b) => (missing(a) || missing(b) || !down ? compare(column(a, sort), column(b, sort)) : compare(column(b, sort), column(a, sort))));
}

// Groups of rows with equal values of a key, in the order of the values.
export function grouped(rows, key) {
  const found = new Map();
  for (const row of rows) {
    const name = texts.value(row.config[key]);
    found.set(name, [...(found.get(name) || []), row]);
  }
  const groups = [...found.values()].map((members) => ({ value: members[0].config[key], rows: members })).sort((a, b) => compare(a.value, b.value));
  groups.forEach((group, i) => { group.color = `var(--run${i % COLORS})`; });
  const lines = (table, rounded) => {
    const figures = (group) => table.results.flatMap((name) => cells(mean(group.rows.map((row) => row.results[name] && row.results[name].value)), rounded));
    const seconds = (group) => mean(group.rows.map((row) => row.seconds))?.value;
    return [[key, "runs", ...results(table, rounded), rounded ? "time" : "seconds"],
      ...groups.map((group) => [texts.value(group.value), group.rows.length, ...figures(group), rounded ? clock(seconds(group) ?? 0) : seconds(group)])];
  };
  return { groups, lines };
}

// A result in one cell, rounded, or in three.
function cells(found, rounded) {
  if (!rounded) return [found?.value, found?.low, found?.high];
  if (!found) return [""];
  return [found.low === undefined || found.low === null ? number(found.value) : `${number(found.value)} [${number(found.low)}, ${number(found.high)}]`];
}

const results = (table, rounded) => (rounded ? table.results : table.results.flatMap((name) => [name, `${name} low`, `${name} high`]));

export const texts = {
  value: (value) => (value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value)),
  header: (table, rounded) => ["run", "state", ...table.keys, ...results(table, rounded), ...(rounded ? ["updates", "time"] : ["update", "updates", "seconds"]), "machine"],
  row: (row, table, rounded) => [row.name, row.state, ...table.keys.map((key) => texts.value(row.config[key])), ...table.results.flatMap((name) => cells(row.results[name], rounded)),
    ...(rounded ? [`${row.update}/${row.updates ?? "?"}`, row.seconds === null ? "" : clock(row.seconds)] : [row.update, row.updates, row.seconds]), row.machine],
};
