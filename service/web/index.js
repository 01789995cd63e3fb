"use strict";
// What the service has and does, kept fresh. All text from the service goes in as text, never as HTML.

const BUSY_MS = 1000, IDLE_MS = 3000;
const SPEED_MS = 6000, STALL_MS = 90000; // over how long speeds, and the reports of training loops, are taken

const byId = (id) => document.getElementById(id);
const number = (value) => (value === undefined || value === null ? "" : value.toLocaleString("en"));
let chosen = null; // id of the dataset that the commands name; null: the newest
let views = [];
let health = null;
const samples = []; // figures of /metrics, the oldest first

function short(value, unit) {
  let step = 0;
  while (Math.abs(value) >= 1000 && step < 4) { value /= 1000; step += 1; }
  const digits = step === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${["", "k", "M", "G", "T"][step]}${unit}`;
}

function token() { return sessionStorage.getItem("token"); }

// ---------------------------------------------------------------- datasets

function cell(row, text, name) {
  const made = row.insertCell();
  made.textContent = text;
  if (name) made.className = name;
  return made;
}

function stateCell(row, view) {
  const made = cell(row, "", view.state);
  if (view.state !== "packing" && view.state !== "queued") { made.textContent = view.state; return; }
  const { partitions_committed: done, num_partitions: all } = view.progress;
  const bar = document.createElement("progress");
  if (all) bar.value = done / all;
  const label = document.createElement("small");
  label.textContent = view.state === "queued" ? "queued" : all ? `${done} of ${all} parts` : "reading the source";
  made.append(bar, label);
}

function source(view) {
  const paths = view.spec && view.spec.source ? view.spec.source.paths : [];
  if (!paths.length) return "";
  const packed = /^dataset:\/\/([0-9a-f]{32})$/.exec(paths[0]); // packed anew: by name where it is here and has one
  if (packed) {
    const from = views.find((one) => one.id === packed[1]);
    return `dataset://${(from && from.name) || packed[1].slice(0, 12)}`;
  }
  const last = paths[0].split("/").filter(Boolean).pop() || paths[0];
  return paths.length > 1 ? `${last} and ${paths.length - 1} more` : last;
}

function age(created) {
  if (!created) return "";
  const seconds = (Date.now() - Date.parse(created)) / 1000;
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= size) return `${Math.floor(seconds / size)} ${unit} ago`;
  }
  return "just now";
}

function nameCell(row, view) {
  const made = row.insertCell();
  const pick = document.createElement("button");
  pick.textContent = view.name || view.id.slice(0, 12);
  pick.title = "Put it into the commands below";
  pick.addEventListener("click", () => { chosen = view.id; show(); });
  made.append(pick);
  if (view.name) {
    const id = document.createElement("small");
    id.textContent = view.id.slice(0, 12);
    id.title = view.id;
    made.append(id);
  }
}

function showDatasets() {
  const body = byId("datasets");
  const rows = document.createDocumentFragment();
  const target = theDataset();
  for (const view of views) {
    const row = document.createElement("tr");
    row.setAttribute("aria-selected", String(target !== null && view.id === target.id));
    nameCell(row, view);
    stateCell(row, view);
    cell(row, number(view.progress.num_packs), "number");
    cell(row, number(view.progress.tokens_packed), "number");
    cell(row, view.report ? `${(100 * view.report.fill).toFixed(2)} %` : "", "number");
    cell(row, view.progress.num_bytes ? short(view.progress.num_bytes, "B") : "", "number");
    cell(row, age(view.created)).title = view.created || "";
    cell(row, source(view)).title = ((view.spec && view.spec.source.paths) || []).join("\n");
    rows.append(row);
    // The report repeats what was known of the spec before, and adds what the rows brought.
    const warnings = new Set([...(view.warnings || []), ...((view.report && view.report.warnings) || [])]);
    for (const text of [view.error && view.error.detail, ...warnings].filter(Boolean)) {
      const more = document.createElement("tr");
      const why = more.insertCell();
      why.colSpan = 8;
      why.className = view.error && text === view.error.detail ? "why" : "warning";
      why.textContent = text;
      rows.append(more);
    }
  }
  if (!body.contains(document.activeElement)) body.replaceChildren(rows);
  else if (body.childElementCount !== rows.childElementCount || !body.querySelector(":focus:active")) {
    const at = [...body.querySelectorAll("button")].indexOf(document.activeElement);
    body.replaceChildren(rows);
    const buttons = body.querySelectorAll("button");
    if (buttons[at]) buttons[at].focus();
  }
  byId("table").hidden = views.length === 0;
  byId("none").hidden = views.length > 0 || !byId("sign-in").hidden;
}

// ---------------------------------------------------------------- commands

function theDataset() {
  return views.find((view) => view.id === chosen) || views.find((view) => view.state !== "failed") || null;
}

function called(view) {
  const alone = view.name && views.filter((one) => one.name === view.name).length === 1;
  if (!alone) return view.id.slice(0, 12);
  return /^[\w.-]+$/.test(view.name) ? view.name : `'${view.name.replaceAll("'", "'\\''")}'`;
}

function showCommands() {
  const view = theDataset();
  const url = location.origin;
  const name = view ? called(view) : "NAME";
  byId("chosen").textContent = view ? view.name || view.id.slice(0, 12) : "it";
  byId("token-hint").hidden = !token();
  byId("pack").textContent =
    `padfree pack /data/rows.jsonl --url ${url} \\\n    --tokenizer /data/tokenizer --max-tokens 8192 --name NAME`;
  byId("stream").textContent = `padfree stream ${name} --url ${url}`;
  byId("loop").textContent = [
    "from trainer_client import PackedStream",
    "",
    `stream = PackedStream("${url}", dataset="${view ? view.id : "…"}", rank=rank, world_size=world_size)`,
    "for batch in stream:",
    "    loss = model(**batch.for_transformers(), num_items_in_batch=batch.num_items_in_batch).loss",
  ].join("\n");
}

for (const button of document.querySelectorAll("[data-copies]")) {
  button.addEventListener("click", async () => {
    const pre = byId(button.dataset.copies);
    getSelection().selectAllChildren(pre); // where the clipboard is not to be had: ready to copy by hand
    try {
      await navigator.clipboard.writeText(pre.textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    } catch { button.textContent = "Selected"; }
  });
}

// ---------------------------------------------------------------- figures

function parse(text) {
  const sums = { at: Date.now() };
  for (const line of text.split("\n")) {
    const found = /^(padfree_\w+)(?:\{.*\})? (\S+)$/.exec(line);
    if (found) sums[found[1]] = (sums[found[1]] || 0) + Number(found[2]);
  }
  return sums;
}

// A second's increase of a counter over the last `ms`; null where it is not known yet.
function rate(name, ms) {
  const last = samples[samples.length - 1];
  const first = samples.find((one) => one.at >= last.at - ms);
  const seconds = (last.at - first.at) / 1000;
  return seconds > 0 ? Math.max(0, (last[name] || 0) - (first[name] || 0)) / seconds : null;
}

function showFigures() {
  if (!samples.length) return;
  const last = samples[samples.length - 1];
  const say = (id, value, unit) => { byId(id).textContent = value === null ? "…" : value ? short(value, unit) : "–"; };
  say("packing", rate("padfree_packed_tokens_total", SPEED_MS), " tokens/s");
  say("sending", rate("padfree_served_bytes_total", SPEED_MS), "B/s");
  byId("streams").textContent = number(last.padfree_streams_open || 0);
  const trained = rate("padfree_client_seconds_total", STALL_MS);
  const share = trained ? rate("padfree_client_stall_seconds_total", STALL_MS) / trained : null;
  byId("stall").textContent = share === null ? "–" : `${(100 * share).toFixed(share < 0.1 ? 2 : 0)} % of the time`;
}

function showHealth() {
  const problems = Object.entries(health ? health.checks : {}).filter(([, found]) => found !== "ok");
  byId("health").textContent = !health ? "does not answer" : health.ready ? "ready"
    : problems.map(([what, found]) => `${what}: ${found}`).join(", ");
  byId("health").className = health && health.ready ? "ready" : "waiting";
}

// ---------------------------------------------------------------- refresh

function show() { showDatasets(); showCommands(); showFigures(); showHealth(); }

async function refreshDatasets() {
  const given = token();
  const answer = await fetch("/v1/datasets", { headers: given ? { Authorization: `Bearer ${given}` } : {} });
  byId("sign-in").hidden = answer.status !== 401;
  const body = await answer.json();
  views = answer.ok ? body.datasets : [];
  views.sort((one, other) => (other.created || "").localeCompare(one.created || ""));
  return answer.ok || answer.status === 401 ? "" : body.detail;
}

async function refreshFigures() {
  const answer = await fetch("/metrics");
  if (!answer.ok) return;
  samples.push(parse(await answer.text()));
  while (samples[0].at < Date.now() - STALL_MS) samples.shift();
}

async function refresh() {
  let notice;
  try {
    [notice] = await Promise.all([
      refreshDatasets(), refreshFigures(), fetch("/readyz").then(async (answer) => { health = await answer.json(); }),
    ]);
  } catch (error) {
    notice = `The service does not answer (${error.message}).`;
    health = null;
  }
  byId("notice").textContent = notice;
  byId("notice").hidden = !notice;
  show();
  const busy = views.some((view) => view.state === "packing" || view.state === "queued");
  setTimeout(refresh, busy ? BUSY_MS : IDLE_MS);
}

byId("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", byId("token").value);
});
refresh();
