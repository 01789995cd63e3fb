"use strict";
// Draws openapi.json as plain text: no library, nothing from elsewhere.

function element(name, text) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  return made;
}

function parameters(list) {
  const table = element("table");
  for (const one of list) {
    const row = table.insertRow();
    const schema = one.schema || {};
    const kind = schema.enum ? schema.enum.join(" | ") : schema.type || (schema.anyOf || []).map((s) => s.type).join(" | ");
    const fallback = schema.default === undefined ? "" : `default ${JSON.stringify(schema.default)}`;
    for (const text of [one.name, one.in, kind, fallback, one.description || ""]) row.insertCell().textContent = text;
  }
  return table;
}

function call(method, path, operation) {
  const made = element("details");
  const summary = element("summary");
  summary.append(element("code", `${method.toUpperCase()} ${path}`));
  made.append(summary, element("p", operation.description || ""));
  if (operation.parameters) made.append(parameters(operation.parameters));
  const body = operation.requestBody?.content?.["application/json"]?.schema;
  if (body) {
    made.append(element("p", "Body:"), element("pre", JSON.stringify(body.examples ? body.examples[0] : body, null, 2)));
  }
  const table = element("table");
  for (const [status, answer] of Object.entries(operation.responses)) {
    const row = table.insertRow();
    row.insertCell().textContent = status;
    row.insertCell().textContent = answer.description;
  }
  made.append(table);
  return made;
}

async function draw() {
  const document_ = await (await fetch("/openapi.json")).json();
  for (const [path, operations] of Object.entries(document_.paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      document.getElementById("calls").append(call(method, path, operation));
    }
  }
}
draw();
