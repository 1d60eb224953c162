// Requests to this page's own address, below its token. A report has the answers in the page.

const inside = document.getElementById("answers");
const answers = inside ? JSON.parse(inside.textContent) : null;
export const isReport = answers !== null;

// A report is of one run, and whole.
function place(path, params) {
  const names = Object.keys(params).filter((name) => !["run", "offset", "mark"].includes(name)).sort();
  return names.length ? `${path}?${names.map((name) => `${name}=${params[name]}`).join("&")}` : path;
}

export const holds = (path, params = {}) => !isReport || place(path, params) in answers;

// A file of a run is damaged; the message names it.
class Damaged extends Error {}

export async function get(path, params = {}, signal = undefined) {
  if (isReport) {
    if (holds(path, params)) return answers[place(path, params)];
    throw new Error("This is not in the report. tramontane view shows everything that the run recorded.");
  }
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    if (value !== "" && value !== undefined && value !== null) query.set(key, value);
  }
  const answer = await fetch(`api/${path}?${query}`, { signal });
  if (!answer.ok) {
    let detail = answer.statusText;
    try { detail = (await answer.json()).detail; } catch { /* not JSON: the status says it */ }
    const message = typeof detail === "string" ? detail : JSON.stringify(detail);
    throw answer.status === 422 ? new Damaged(message) : new Error(message);
  }
  return answer.json();
}

// Metrics and evaluations of all runs, kept and extended by what was written since the last call.
const tails = new Map();

// A run whose files are damaged has the reasons in `damaged`, and leaves the others alone.
export async function measured(run) {
  const tail = tails.get(run) || { rows: new Map(), evaluations: [], offset: 0, mark: 0, finished: false, skipped: [], damaged: [] };
  tails.set(run, tail);
  const before = [tail.finished, tail.evaluations.length, ...tail.damaged].join();
  let damaged = [];
  tail.changed = false;
  try {
    const found = await get("metrics", { run, offset: tail.offset, mark: tail.mark });
    if (found.reset) { tail.rows.clear(); tail.skipped = []; }
    for (const row of found.rows) tail.rows.set(row.update, row); // a later line replaces an earlier
    tail.skipped = [...new Set([...tail.skipped, ...found.damaged])];
    tail.changed = found.reset || found.rows.length > 0;
    Object.assign(tail, { offset: found.offset, mark: found.mark, finished: found.finished });
    tail.evaluations = await get("evaluations", { run });
  } catch (error) {
    if (!(error instanceof Damaged)) throw error;
    damaged = [error.message];
  }
  tail.damaged = [...tail.skipped, ...damaged];
  tail.changed ||= before !== [tail.finished, tail.evaluations.length, ...tail.damaged].join();
  return tail;
}
