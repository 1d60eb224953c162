// Requests to this page's own address, below its token.

// A file of a run is damaged; the message names it.
export class Damaged extends Error {}

export async function get(path, params = {}, signal = undefined) {
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
