// Curves of several runs over each other, live while they train.

import { h, replace } from "./dom.js";
import { get, isReport, measured } from "./api.js";
import { fill, metricsOf, sections } from "./charts.js";

export const SHORTCUTS = [["x", "over updates, or over time"], ["+ −", "smooth more, smooth less"],
  ["← →", "move the cursor of a focused chart"]];
const POLL = 2000; // milliseconds between two looks at runs that train

let timer = null, charts = [], state = null, page = null, specs = null;
const MOST = 12; // runs shown at first
const UNREAD = { rows: new Map(), evaluations: [], damaged: [], finished: true };
let hidden = null; // numbers of runs

export function leave() {
  clearTimeout(timer);
  timer = null;
  charts.forEach(({ chart }) => chart.close());
  charts = [];
}

export async function show(main, values, thePage) {
  page = thePage;
  state = { x: values.x === "time" ? "time" : "update", smooth: +(values.smooth || 0) };
  specs = specs || await get("charts");
  hidden = hidden || new Set(page.runs.slice(MOST).map((run) => run.run));
  page.runs.forEach((run) => { run.tail = run.tail || UNREAD; });
  await read(shown());
  state.body = h("div", { class: "sections" });
  state.chips = h("ul", { class: "chips", "aria-label": "Runs" });
  state.damaged = h("div", {});
  state.note = h("b", {});
  state.slider = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smooth, oninput: (e) => set({ smooth: +e.target.value }) });
  state.axis = h("select", { onchange: (e) => set({ x: e.target.value }) },
    h("option", { value: "update", selected: state.x === "update" }, "updates"),
    h("option", { value: "time", selected: state.x === "time" }, "wall time"));
  replace(main, h("div", { class: "bar" }, state.chips,
    h("div", { class: "controls" },
      h("label", { class: "field" }, h("span", {}, "Over"), state.axis),
      h("label", { class: "field" }, h("span", {}, "Smoothing ", state.note), state.slider))), state.damaged, state.body);
  build();
  if (!isReport) poll();
}

function set(change) {
  Object.assign(state, change);
  page.go("curves", { x: state.x === "time" ? "time" : "", smooth: state.smooth || "" }, true);
  refresh();
}

export function key(event) {
  if (event.key === "x") { set({ x: state.x === "time" ? "update" : "time" }); state.axis.value = state.x; return true; }
  if (event.key === "+" || event.key === "-") {
    const smooth = Math.min(0.98, Math.max(0, state.smooth + (event.key === "+" ? 0.2 : -0.2)));
    state.slider.value = smooth;
    set({ smooth: +smooth.toFixed(2) });
    return true;
  }
  return false;
}

async function read(runs) {
  const found = await Promise.all(runs.map((run) => measured(run.run)));
  runs.forEach((run, i) => { run.tail = found[i]; });
  return found;
}

const shown = () => page.runs.filter((run) => !hidden.has(run.run));

function chips() {
  replace(state.damaged, page.runs.flatMap((run) => run.tail.damaged).map((reason) => h("p", { class: "error" }, reason)));
  replace(state.chips, page.runs.map((run) => {
    const rows = run.tail.rows.size;
    const last = rows ? Math.max(...run.tail.rows.keys()) : 0;
    const status = run.tail === UNREAD ? "" : run.tail.finished ? "finished" : `update ${last}${run.updates ? ` of ${run.updates}` : ""}`;
    return h("li", {}, h("label", { class: "chip", vars: { "--c": run.color }, title: run.path },
      h("input", { type: "checkbox", checked: !hidden.has(run.run), onchange: async (e) => {
        if (e.target.checked) hidden.delete(run.run); else hidden.add(run.run);
        await read([run]);
        build();
      } }), h("i", {}), h("b", {}, run.label), h("span", {}, status)));
  }));
}

// Which charts there are depends on the runs that are shown and on their metrics.
function build() {
  charts.forEach(({ chart }) => chart.close());
  chips();
  const found = sections(shown(), specs);
  charts = found.flatMap(([, made]) => made);
  state.metrics = metricsOf(shown()).size;
  replace(state.body, found.map(([title, made]) =>
    h("section", {}, h("h2", {}, title), h("div", { class: "charts" }, made.map(({ chart }) => chart.element)))));
  if (!charts.length) {
    replace(state.body, h("p", { class: "empty" }, page.runs.length === hidden.size ? "No run is chosen." : "No update is recorded yet; this page shows the first as soon as it is done."));
  }
  refresh();
}

function refresh() {
  state.note.textContent = state.smooth ? state.smooth.toFixed(2) : "off";
  fill(charts, shown(), { time: state.x === "time", smooth: state.smooth });
}

async function poll() {
  timer = setTimeout(async () => {
    try {
      const tails = await read(shown().filter((run) => !run.tail.finished));
      if (timer === null) return;
      if (tails.some((tail) => tail.changed)) {
        if (!charts.length || metricsOf(shown()).size !== state.metrics) build(); else { chips(); refresh(); }
      }
      page.say("");
    } catch (error) {
      page.say(`No answer: ${error.message}. Is tramontane view still running?`);
    }
    if (timer !== null) poll();
  }, POLL);
}
