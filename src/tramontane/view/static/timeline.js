// What each worker did and when: who waited for whom, weight updates, deaths.

import { h, svg, replace, clock } from "./dom.js";
import { get, isReport } from "./api.js";

export const SHORTCUTS = [["+ −", "zoom in, zoom out"], ["← →", "earlier, later"], ["0", "the whole run"]];
const POLL = 3000; // milliseconds
const GENERATES = "generates"; // what a running generator does when it does not wait
const KINDS = [["step", "trains"], [GENERATES, "generates"], ["wait for a batch", "waits for a batch"], ["wait for the generators", "waits for the generators"],
  ["wait for the record", "waits for the record"], ["wait for requests", "waits for requests"], ["evaluation", "evaluates"], ["checkpoint", "writes a checkpoint"]];
const WAITED_FOR = { "wait for a batch": "generators and verifiers", "wait for the generators": "generators, to take weights",
  "wait for the record": "a checkpoint or an evaluation", "wait for requests": "the trainer (staleness bound)" };
// Seconds between two marks of the axis.
const STEPS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400];
const LANE = 34, TOP = 22, NAME = 112;

let page, values, data, range, whole, box, readout, tables, timer, observer;

export function leave() { clearTimeout(timer); timer = null; if (observer) observer.disconnect(); }

export async function show(main, theValues, thePage) {
  page = thePage;
  values = { run: "0", ...theValues };
  data = await get("timeline", { run: values.run });
  whole = range = extent();
  box = h("div", { class: "lanes", tabindex: 0, role: "group", "aria-label": "Timeline; plus and minus zoom, the arrow keys move" });
  readout = h("p", { class: "token-facts" });
  const button = (text, label, act) => h("button", { type: "button", class: "quiet", "aria-label": label, title: label, onclick: act }, text);
  replace(main,
    h("div", { class: "bar" }, h("div", { class: "controls" },
      page.runs.length > 1 ? page.runPicker(+values.run, (run) => page.go("timeline", { run })) : null,
      button("+", "Zoom in", () => zoom(0.5)), button("−", "Zoom out", () => zoom(2)), button("←", "Earlier", () => pan(-0.25)),
      button("→", "Later", () => pan(0.25)), button("All", "The whole run", () => set(whole))),
    h("div", { class: "legend" }, KINDS.filter(([kind]) => used(kind)).map(([kind, text]) => h("span", {}, h("i", { "data-kind": kind }), text)),
      h("span", {}, h("i", { class: "tick" }), "new weights"), h("span", {}, h("b", { class: "death" }, "✕"), "lost"))),
    data.missing.length ? h("p", { class: "notice" }, "Not in this run: ", data.missing.join("; "), ".") : null,
    data.left_out ? h("p", { class: "notice" }, `The ${data.left_out.toLocaleString("en")} oldest activities are not shown.`) : null,
    whole ? [box, readout, tables = h("div", { class: "two" }, shares(), happenings())] : h("p", { class: "empty" }, "Nothing is recorded yet."));
  if (!whole) return;
  observer = new ResizeObserver(draw);
  observer.observe(box);
  if (!isReport && !page.runs[+values.run].finished) poll();
}

const used = (kind) => data.lanes.some((lane) => (kind === GENERATES && lives(lane).length) || lane.activities.some((a) => a.activity === kind));

function extent() {
  const times = data.lanes.flatMap((lane) => [...lane.activities.flatMap((a) => [a.began, a.began + a.seconds]),
    ...lane.versions.map((v) => v.time), ...lane.losses.map((l) => l.time), ...lane.starts]);
  if (!times.length) return null;
  const low = times.reduce((a, b) => Math.min(a, b)), high = times.reduce((a, b) => Math.max(a, b));
  return [low, Math.max(high, low + 1)];
}

// From each start of a generator to its loss, or to the end. A generator without a process of its
// own, a thread, lives as long as the run.
function lives(lane) {
  if (!whole || !lane.worker.startsWith("generator")) return [];
  const starts = lane.starts.length ? lane.starts : [whole[0]];
  return starts.map((began, i) => {
    const ends = [...lane.losses.map((l) => l.time), ...starts.slice(i + 1), whole[1]].filter((t) => t > began);
    return { activity: GENERATES, began, seconds: Math.min(...ends) - began };
  });
}

function set([low, high]) { range = [low, high]; draw(); }
function zoom(factor) {
  const middle = (range[0] + range[1]) / 2, half = Math.max(0.05, ((range[1] - range[0]) / 2) * factor);
  set([Math.max(whole[0], middle - half), Math.min(whole[1], middle + half)]);
}
function pan(part) {
  const size = range[1] - range[0];
  const low = Math.min(whole[1] - size, Math.max(whole[0], range[0] + part * size));
  set([low, low + size]);
}

export function key(event) {
  if (!whole) return false;
  const act = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => pan(-0.25), ArrowRight: () => pan(0.25), 0: () => set(whole) }[event.key];
  if (!act) return false;
  act();
  return true;
}

function draw() {
  const width = Math.max(280, box.clientWidth), height = TOP + LANE * data.lanes.length + 4;
  const narrow = width < 560, left = narrow ? 4 : NAME;
  const lane = narrow ? LANE + 12 : LANE;
  const X = (t) => left + ((t - range[0]) / (range[1] - range[0])) * (width - left - 8);
  const picture = svg("svg", { width, height: narrow ? TOP + lane * data.lanes.length + 4 : height, class: "timeline-svg" });
  const size = (range[1] - range[0]) / Math.max(2, Math.floor(width / 110));
  const step = STEPS.find((s) => s >= size) || STEPS[STEPS.length - 1];
  const first = Math.ceil((range[0] - whole[0]) / step);
  for (let i = first; whole[0] + i * step <= range[1]; i++) {
    const x = X(whole[0] + i * step);
    picture.append(svg("line", { class: "grid", x1: x, x2: x, y1: TOP, y2: "100%" }),
      svg("text", { x, y: 14, "text-anchor": x < left + 30 ? "start" : x > width - 40 ? "end" : "middle" }, clock(i * step)));
  }
  data.lanes.forEach((row, n) => {
    const y = TOP + lane * n + (narrow ? 14 : 0);
    picture.append(svg("text", { class: "name", x: narrow ? 4 : 0, y: narrow ? y - 3 : y + LANE / 2 + 4 }, row.worker),
      svg("rect", { class: "track", x: left, y: y + 5, width: width - left - 8, height: 22, rx: 3 }));
    for (const a of [...lives(row), ...row.activities]) {
      const end = a.began + a.seconds;
      if (end < range[0] || a.began > range[1]) continue;
      const x = X(Math.max(a.began, range[0])), w = Math.max(0.7, X(Math.min(end, range[1])) - x);
      const text = `${row.worker}: ${KINDS.find(([k]) => k === a.activity)?.[1] || a.activity} for ${clock(a.seconds)}, from ${clock(a.began - whole[0])}`;
      picture.append(svg("rect", { "data-kind": a.activity, x, y: y + 5, width: w, height: 22, onpointerenter: () => replace(readout, text) }, svg("title", {}, text)));
    }
    for (const v of row.versions) {
      if (v.time < range[0] || v.time > range[1]) continue;
      const text = `${row.worker}: weights of version ${v.version} after ${clock(v.time - whole[0])}`;
      picture.append(svg("line", { class: "tick", x1: X(v.time), x2: X(v.time), y1: y + 3, y2: y + 29, onpointerenter: () => replace(readout, text) }, svg("title", {}, text)));
    }
    for (const l of row.losses) {
      if (l.time < range[0] || l.time > range[1]) continue;
      picture.append(svg("text", { class: "death", x: X(l.time), y: y + 21, "text-anchor": "middle", onpointerenter: () => replace(readout, l.reason) }, "✕", svg("title", {}, l.reason)));
    }
  });
  replace(box, picture);
}

function shares() {
  const rows = data.lanes.flatMap((lane) => {
    const sums = new Map();
    for (const a of lane.activities) sums.set(a.activity, (sums.get(a.activity) || 0) + a.seconds);
    return [...sums].map(([activity, seconds]) => [lane.worker, activity, seconds]);
  });
  const all = whole[1] - whole[0];
  return h("section", {}, h("h2", {}, "Who waited for whom"), rows.length ? h("table", { class: "plain" },
    h("thead", {}, h("tr", {}, ["Worker", "Activity", "Waited for"].map((t) => h("th", { scope: "col" }, t)), ["Time", "Share"].map((t) => h("th", { scope: "col", class: "n" }, t)))),
    h("tbody", {}, rows.map(([worker, activity, seconds]) => h("tr", {}, h("td", {}, worker), h("td", {}, h("i", { "data-kind": activity }), KINDS.find(([k]) => k === activity)?.[1] || activity),
      h("td", {}, WAITED_FOR[activity] || ""), h("td", { class: "n" }, clock(seconds)), h("td", { class: "n" }, `${((100 * seconds) / all).toFixed(1)} %`))))) : h("p", { class: "empty" }, "Not recorded."));
}

function happenings() {
  const deaths = data.lanes.flatMap((lane) => lane.losses.map((l) => ({ time: l.time, text: `lost: ${l.reason}` })));
  const known = data.events.filter((e) => !deaths.some((d) => e.text.includes(d.text.slice(6))));
  const rows = [...deaths, ...known].sort((a, b) => a.time - b.time);
  return h("section", {}, h("h2", {}, "Deaths and events"), rows.length ? h("ul", { class: "events" }, rows.map((e) =>
    h("li", {}, h("time", {}, clock(Math.max(0, e.time - whole[0]))), h("span", {}, e.text)))) : h("p", { class: "empty" }, "None."));
}

function poll() {
  timer = setTimeout(async () => {
    const atEnd = range[1] === whole[1], all = range[0] === whole[0];
    try {
      data = await get("timeline", { run: values.run });
    } catch (error) {
      page.say(`No answer: ${error.message}. Is tramontane view still running?`);
    }
    if (timer === null) return;
    const before = whole;
    whole = extent() || whole;
    if (atEnd) range = all ? whole : [range[0] + whole[1] - before[1], whole[1]];
    replace(tables, shares(), happenings());
    draw();
    poll();
  }, POLL);
}
