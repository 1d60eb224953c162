// The page: tabs, the address of each view, colors and keyboard shortcuts.

import { h, replace } from "./dom.js";
import { get, isReport } from "./api.js";
import * as summary from "./summary.js";
import * as curves from "./curves.js";
import * as rollouts from "./rollouts.js";
import * as rollout from "./rollout.js";
import * as groups from "./groups.js";
import * as compare from "./compare.js";
import * as audit from "./audit.js";
import * as timeline from "./timeline.js";
import * as runs from "./runs.js";

const VIEWS = { summary, curves, rollouts, rollout, groups, compare, audit, timeline, runs };
const HELD = ["summary", "curves", "groups", "timeline"]; // what a report has
const TABS = [["summary", "Summary"], ["curves", "Curves"], ["rollouts", "Rollouts"], ["groups", "Groups"],
  ["compare", "Compare"], ["audit", "Audit"], ["timeline", "Timeline"], ["runs", "Runs"]].filter(([view]) => !isReport || HELD.includes(view));
const COMMON = [[`1 … ${TABS.length}`, "go to a view"], ["?", "these shortcuts"], ["t", "colors: system, light, dark"],
  ["Esc", "back, or close"]];
const PATIENCE = 150; // milliseconds before a view that is loading says so
const FEW = 2; // runs; with more, the page opens with their table
const THEMES = ["system", "light", "dark"];

const main = document.getElementById("main");
const help = document.getElementById("shortcuts");
let current = null;

export const page = {
  runs: [],
  // The view's name and values are the address after #, so that links and the back button work.
  go(view, values = {}, swap = false) {
    const query = new URLSearchParams(Object.entries(values).filter(([, v]) => v !== "" && v !== undefined && v !== null));
    const address = `#${view}${query.size ? "?" + query : ""}`;
    if (swap) { history.replaceState(null, "", address); return; }
    if (address === location.hash) show(); else location.hash = address;
  },
  link(view, values, ...children) {
    const query = new URLSearchParams(values);
    return h("a", { href: `#${view}?${query}` }, ...children);
  },
  say(text) { document.getElementById("status").textContent = text; },
  runPicker(value, change, label = "Run") {
    const options = page.runs.map((run) => h("option", { value: run.run, selected: run.run === value }, run.label));
    return h("label", { class: "field" }, h("span", {}, label),
      h("select", { class: "run", onchange: (event) => change(+event.target.value) }, options));
  },
};

function route() {
  const [view, query] = location.hash.replace(/^#/, "").split("?");
  const first = isReport ? "summary" : page.runs.length > FEW ? "runs" : "curves";
  return [VIEWS[view] ? view : first, Object.fromEntries(new URLSearchParams(query || ""))];
}

async function show() {
  const [name, values] = route();
  const tab = name !== "rollout" ? name : isReport ? "groups" : "rollouts";
  for (const link of document.querySelectorAll("#tabs a")) {
    if (link.dataset.view === tab) {
      link.setAttribute("aria-current", "page");
      // On a phone, not all have room. `scrollIntoView` would also move where the Tab key begins.
      const tabs = document.getElementById("tabs"), [outer, inner] = [tabs, link].map((x) => x.getBoundingClientRect());
      tabs.scrollLeft += inner.left - outer.left - (outer.width - inner.width) / 2;
    } else link.removeAttribute("aria-current");
  }
  if (current && current.leave) current.leave();
  current = VIEWS[name];
  main.className = name;
  document.title = `${(TABS.find(([view]) => view === tab) || ["", ""])[1]} · ${isReport ? page.runs[0].name : "Tramontane"}`;
  page.say("");
  const late = setTimeout(() => { page.say("Loading …"); main.ariaBusy = "true"; }, PATIENCE);
  try {
    await current.show(main, values, page);
    page.say("");
  } catch (error) {
    page.say("");
    if (error.name === "AbortError") return;
    replace(main, h("p", { class: "error", role: "alert" }, error.message));
  } finally {
    clearTimeout(late);
    main.ariaBusy = null;
  }
}

function setTheme(theme) {
  localStorage.setItem("theme", theme);
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  document.dispatchEvent(new Event("themed"));
  document.getElementById("theme").title = `Colors: ${theme === "system" ? "as the system" : theme} (t)`;
}

const theme = () => localStorage.getItem("theme") || "system";
const nextTheme = () => setTheme(THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]);

function showHelp() {
  const more = (current && current.SHORTCUTS) || [];
  const rows = [...more, ...COMMON].map(([keys, what]) =>
    h("tr", {}, h("th", { scope: "row" }, keys.split(" ").map((key) => [h("kbd", {}, key), " "])), h("td", {}, what)));
  replace(help, h("h2", { id: "shortcuts-title" }, "Keyboard"), h("table", {}, h("tbody", {}, rows)),
    h("form", { method: "dialog" }, h("button", { autofocus: true }, "Close")));
  help.showModal();
}

function typing(target) {
  return target.matches("input:not([type=checkbox]):not([type=radio]):not([type=range]), textarea, select");
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (typing(event.target)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const tab = TABS[+event.key - 1];
  if (tab) page.go(tab[0]);
  else if (event.key === "?") showHelp();
  else if (event.key === "t") nextTheme();
  else if (current && current.key && current.key(event)) { /* the view took it */ } else return;
  event.preventDefault();
});

document.getElementById("theme").addEventListener("click", nextTheme);
document.getElementById("help").addEventListener("click", showHelp);
document.getElementById("skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
window.addEventListener("hashchange", show);

async function start() {
  setTheme(theme());
  replace(document.getElementById("tabs"), TABS.map(([view, title], place) =>
    h("a", { href: `#${view}`, "data-view": view, title: `${title} (${place + 1})` }, title)));
  page.runs = await get("runs");
  const names = page.runs.map((run) => run.name);
  for (const run of page.runs) {
    const twice = names.filter((name) => name === run.name).length > 1;
    run.color = `var(--run${run.run % 8})`;
    run.label = twice ? run.path.split("/").slice(-2).join("/") : run.name;
  }
  if (isReport) document.querySelector(".brand h1").textContent = page.runs[0].name;
  await show();
}

start().catch((error) => replace(main, h("p", { class: "error", role: "alert" }, error.message)));
