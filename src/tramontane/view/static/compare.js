// Answers of two runs to one problem, side by side.

import { h, replace, badge, number, pictures, signed } from "./dom.js";
import { get } from "./api.js";
import { transcript } from "./conversation.js";

export const SHORTCUTS = [["/", "find a problem"], ["j k", "next problem, problem before"]];

let page, values, listed = [], finder;

export async function show(main, theValues, thePage) {
  page = thePage;
  const last = page.runs.length > 1 ? 1 : 0;
  values = { a: "0", b: String(last), ...theValues };
  // A run beside itself is compared before and after training.
  values.from ??= values.a === values.b ? "before" : "";
  values.to ??= "";
  finder = h("input", { type: "search", name: "part", value: values.part || "", placeholder: "part of its id  ( / )", autocomplete: "off",
    onchange: (e) => page.go("compare", { ...values, problem: "", part: e.target.value.trim() }) });
  const found = await get("problems", { among: `${values.a}:${values.from},${values.b}:${values.to}`, part: values.part });
  listed = found.rows;
  const chosen = values.problem || (listed[0] || {}).problem_id;
  values.problem = chosen;
  const go = (change) => page.go("compare", { ...values, ...change, problem: "" });
  const picker = (side, label) => page.runPicker(+values[side], (run) => go({ [side]: run, from: "", to: "" }), label);
  const source = (key, place, label) => h("label", { class: "field" }, h("span", {}, label), h("select", { onchange: (e) => go({ [key]: e.target.value }) },
    found.choices[place].map((name) => h("option", { value: name, selected: name === found.sources[place] }, name.replaceAll("_", " ")))));
  const sides = h("div", { class: "sides" });
  replace(main,
    h("div", { class: "bar" }, h("div", { class: "controls" }, picker("a", "Left"), source("from", 0, "answers of"),
      picker("b", "Right"), source("to", 1, "answers of"),
      h("label", { class: "field" }, h("span", {}, "Problem"), finder)),
    h("p", { class: "count" }, `${found.count.toLocaleString("en")} problems that both answered`, difference(found.difference))),
    listed.length ? h("div", { class: "compare-body" },
      h("nav", { class: "problems", "aria-label": "Problems, those with the largest difference first" },
        h("ol", {}, listed.map((row) => h("li", {}, h("a", {
          href: address(row.problem_id), "aria-current": row.problem_id === chosen ? "true" : undefined },
        h("span", {}, row.problem_id), h("small", {}, row.counts.map((c) => `${c.right}/${c.n}`).join(" · "))))))), sides)
      : h("p", { class: "empty" }, "The two sides have no problem in common."));
  const current = main.querySelector(".problems [aria-current]");
  if (current) {
    const list = current.closest(".problems"), [outer, inner] = [list, current].map((x) => x.getBoundingClientRect());
    list.scrollTop += inner.top - outer.top - (outer.height - inner.height) / 2;
  }
  if (!chosen) return;
  const [left, right] = await Promise.all([values.a, values.b].map((run) => get("answers", { run, problem_id: chosen })));
  replace(sides, h("section", { class: "asked" }, h("h2", {}, "Problem ", h("small", {}, chosen)),
    h("pre", { class: "statement" }, left.problem || right.problem || ""),
    pictures(left.pictures.length ? left.pictures : right.pictures),
    h("p", {}, "Reference: ", h("code", {}, left.reference ?? right.reference ?? "–"))),
  h("div", { class: "columns" }, side(values.a, left, found.sources[0]), side(values.b, right, found.sources[1])));
}

const difference = (d) => (d ? `; pass@1 of the right side, on these: ${signed(d.value, 3)} [${signed(d.low, 3)}, ${signed(d.high, 3)}], better on ${d.better}, worse on ${d.worse}` : "");

const address = (problem) => `#compare?${new URLSearchParams({ ...values, problem })}`;

function side(run, answers, source) {
  const box = h("div", { class: "answer" });
  const names = answers.rows.map((row, i) => [i, row.source === "training"
    ? `update ${row.update}, completion ${row.index}: ${row.verdict}` : `evaluation ${row.source.replaceAll("_", " ")}, completion ${row.index}: ${row.verdict}`]);
  const first = answers.rows.findLastIndex((row) => row.source === source);
  const pick = async (i) => {
    const row = answers.rows[i];
    const whole = row.text === undefined ? await get("rollout", { run, update: row.update, row: row.row }) : row;
    replace(box, h("p", { class: "line" }, badge(row.verdict), ` reward ${number(row.reward)}`,
      row.advantage === null || row.advantage === undefined ? "" : ` · advantage ${signed(row.advantage)}`, ` · ${row.tokens} tokens`,
      row.reason ? ` · ${row.reason}` : "", row.source === "training" ? [" · ", page.link("rollout", { run, update: row.update, row: row.row }, "tokens")] : null),
    whole.turns && whole.turns.length ? transcript(whole) : h("pre", { class: "completion" }, whole.text));
  };
  if (first >= 0) pick(first);
  return h("section", { class: "side", vars: { "--c": page.runs[+run].color } }, h("h2", {}, h("i", {}), page.runs[+run].label),
    h("label", { class: "field" }, h("span", {}, `${answers.rows.length} answers`),
      h("select", { onchange: (e) => pick(+e.target.value) }, names.map(([i, text]) => h("option", { value: i, selected: i === first }, text)))), box);
}

export function key(event) {
  if (event.key === "/") { finder.focus(); finder.select(); return true; }
  const step = { j: 1, k: -1 }[event.key];
  if (!step) return false;
  const next = listed[listed.findIndex((row) => row.problem_id === values.problem) + step];
  if (next) location.hash = address(next.problem_id);
  return true;
}
