"use strict";
// Lists the datasets and keeps the list fresh. All text from the service goes in as text, never as HTML.

const byId = (id) => document.getElementById(id);
const number = (value) => (value === undefined || value === null ? "" : value.toLocaleString("en"));
let chosen = null;

function cell(row, text, title) {
  const made = row.insertCell();
  made.textContent = text;
  if (title) made.title = title;
  return made;
}

function progress(view) {
  const { partitions_committed: done, num_partitions: all } = view.progress;
  if (view.state === "ready") return 1;
  return all ? done / all : 0;
}

function show(views) {
  const body = byId("datasets");
  body.replaceChildren();
  for (const view of views) {
    const row = body.insertRow();
    const link = document.createElement("button");
    link.textContent = view.name || view.id.slice(0, 8);
    link.title = view.id;
    link.addEventListener("click", () => explain(view.id));
    row.insertCell().append(link);
    cell(row, view.state, view.error ? view.error.detail : "").className = view.state;
    const bar = document.createElement("progress");
    bar.value = progress(view);
    row.insertCell().append(bar);
    cell(row, number(view.progress.num_packs));
    cell(row, number(view.progress.tokens_packed));
    cell(row, view.report ? `${(100 * view.report.fill).toFixed(2)} %` : "");
    if (view.error) {
      const why = body.insertRow().insertCell();
      why.colSpan = 6;
      why.className = "why";
      why.textContent = view.error.detail;
    }
  }
  byId("notice").textContent = views.length ? "" : "No dataset yet: POST a spec to /v1/datasets.";
}

function explain(id) {
  chosen = id;
  byId("how").hidden = false;
  byId("example").textContent = [
    "from trainer_client import PackedStream",
    "",
    `stream = PackedStream("${location.origin}", dataset="${id}", rank=0, world_size=1)`,
    "for batch in stream:",
    "    loss = model(**batch.for_transformers()).loss",
    "",
    "# or, without a line of Python:",
    `curl -o rank0.arrows '${location.origin}/v1/datasets/${id}/stream?rank=0&world_size=1'`,
  ].join("\n");
}

async function refresh() {
  const token = sessionStorage.getItem("token");
  try {
    const answer = await fetch("/v1/datasets", { headers: token ? { Authorization: `Bearer ${token}` } : {} });
    byId("sign-in").hidden = answer.status !== 401;
    const body = await answer.json();
    if (answer.ok) show(body.datasets);
    else byId("notice").textContent = body.detail;
  } catch (error) {
    byId("notice").textContent = `The service does not answer (${error.message}).`;
  }
  setTimeout(refresh, 2000);
}

byId("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", byId("token").value);
});
refresh();
