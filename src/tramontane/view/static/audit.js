// Findings of `tramontane audit`.

import { h, replace, badge } from "./dom.js";
import { get } from "./api.js";

export const SHORTCUTS = [];
const MOST = 500; // findings shown of the chosen kinds

let page, values;

export async function show(main, theValues, thePage) {
  page = thePage;
  values = { run: "0", kind: "", ...theValues };
  const found = await get("audit", { run: values.run });
  const picker = page.runs.length > 1 ? h("div", { class: "bar" }, page.runPicker(+values.run, (run) => page.go("audit", { run }))) : null;
  if (!found.audited) {
    replace(main, picker, h("div", { class: "empty" }, h("p", {}, "This run has not been audited. This command looks for reward hacking and verifier errors in its rollouts:"), h("pre", {}, found.command)));
    return;
  }
  const rows = found.rows.filter((row) => !values.kind || row.kind === values.kind);
  const chip = (kind, label, count, meaning) => h("button", { type: "button", class: "kind", "aria-pressed": String(values.kind === kind), title: meaning,
    disabled: kind && !count, onclick: () => page.go("audit", { run: values.run, kind }) }, label, " ", h("b", {}, count.toLocaleString("en")));
  const meaning = (found.kinds.find((k) => k.kind === values.kind) || {}).meaning;
  replace(main, picker,
    h("div", { class: "kinds", role: "group", "aria-label": "Kinds of findings" }, chip("", "all", found.rows.length), found.kinds.map((k) => chip(k.kind, k.kind, k.count, k.meaning))),
    h("p", { class: "count" }, meaning ? `${meaning}. ` : "", "A finding is a place to look at, not a proof."),
    rows.length ? h("div", { class: "scroll" }, h("table", { class: "rows findings" },
      h("thead", {}, h("tr", {}, ["Kind", "Problem", "Verdict", "Answer", "Reference", "Detail"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, rows.slice(0, MOST).map((row) => h("tr", {}, h("td", {}, row.kind),
        h("td", {}, row.update !== undefined ? page.link("rollout", { run: values.run, update: row.update, row: row.row }, row.problem_id) : row.problem_id),
        h("td", {}, badge(row.verdict)), h("td", {}, h("code", {}, row.answer ?? "–")), h("td", {}, h("code", {}, row.reference ?? "–")), h("td", {}, row.detail)))))) : h("p", { class: "empty" }, "Nothing was found."),
    rows.length > MOST ? h("p", { class: "count" }, `${rows.length - MOST} more are in audit.jsonl.`) : null);
}
