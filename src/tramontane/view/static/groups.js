// The groups of one update, with the advantage of each completion.

import { h, replace, asked, badge, number, pictures, signed, notice } from "./dom.js";
import { get, holds } from "./api.js";

export const SHORTCUTS = [["← →", "update before, next update"]];

let page, values, updates;

export async function show(main, theValues, thePage) {
  page = thePage;
  values = { run: "0", ...theValues };
  const facets = await get("facets", { run: values.run });
  updates = facets.updates;
  const update = +(values.update || updates[updates.length - 1] || 0);
  values.update = update;
  const found = await get("groups", { run: values.run, update });
  const kept = found.groups.filter((g) => !g.filtered);
  const step = (by) => h("button", { type: "button", class: "quiet", disabled: next(by) === undefined, onclick: () => go(by), "aria-label": by < 0 ? "Update before" : "Next update" }, by < 0 ? "←" : "→");
  replace(main,
    h("div", { class: "bar" },
      h("div", { class: "controls" },
        page.runs.length > 1 ? page.runPicker(+values.run, (run) => page.go("groups", { run })) : null,
        step(-1),
        h("label", { class: "field" }, h("span", {}, "Update"), h("select", { onchange: (e) => page.go("groups", { run: values.run, update: e.target.value }) },
          updates.map((u) => h("option", { value: u, selected: u === update }, u)))),
        step(1)),
      h("p", { class: "count" }, found.left_out ? `${found.groups.length} of ${found.groups.length + found.left_out} groups: ` : "", `${kept.length} groups trained on, ${found.groups.length - kept.length} filtered`)),
    notice(found.missing.map((name) => `${name} (shown instead: the reward minus the group’s mean)`)),
    found.groups.length ? h("div", { class: "cards" }, found.groups.map(card))
      : h("p", { class: "empty" }, "No rollouts are recorded for this update."));
}

function card(group) {
  const right = group.completions.filter((c) => c.verdict === "right").length;
  return h("article", { class: group.filtered ? "card filtered" : "card" },
    h("header", {}, h("h3", {}, `Group ${group.group}`),
      h("span", { class: "tag" }, `${right} of ${group.completions.length} right`),
      group.language ? h("span", { class: "tag" }, group.language) : null,
      group.filtered ? h("span", { class: "tag warn", title: group.filtered_detail || "" }, group.filtered) : null),
    h("p", { class: "statement" }, asked({ ...group, ending: group.completions[0].ending })),
    pictures(group.pictures),
    groupTable(page, +values.run, values.update, group.completions));
}

export function groupTable(page, run, update, rows, current = null) {
  const value = (row) => row.advantage ?? (rows.some((r) => r.advantage !== null) ? null : row.centered);
  const most = Math.max(1e-9, ...rows.map((row) => Math.abs(value(row) || 0)));
  return h("table", { class: "group" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "#"), h("th", { scope: "col" }, "Verdict"), h("th", { scope: "col", class: "n" }, "Reward"),
      h("th", { scope: "col", class: "n" }, "Advantage"), h("td", {}), h("th", { scope: "col", class: "n" }, "Tokens"))),
    h("tbody", {}, rows.map((row) => {
      const x = value(row);
      const bar = h("span", { class: "bar-box", vars: { "--v": String(x === null || x === undefined ? 0 : x / most) } }, h("i", { class: x > 0 ? "plus" : "minus" }));
      return h("tr", { "aria-current": row.row === current ? "true" : undefined },
        h("td", {}, holds("rollout", { update, row: row.row }) ? page.link("rollout", { run, update, row: row.row }, `${row.index}`) : row.index),
        h("td", {}, badge(row.verdict)), h("td", { class: "n" }, number(row.reward)),
        h("td", { class: "n" }, signed(x)), h("td", { class: "bars" }, bar), h("td", { class: "n" }, row.tokens));
    })));
}

const next = (by) => updates[updates.indexOf(values.update) + by];

function go(by) {
  if (next(by) !== undefined) page.go("groups", { run: values.run, update: next(by) });
}

export function key(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return false;
  go(step);
  return true;
}
