// Request settings: the fields and ranges of the server's OpenAPI document, in two sets that can be compared.

import { $, make } from "./dom.js";
import { get, setKey } from "./server.js";

const FIRST = ["temperature", "top_p", "top_k", "min_p", "max_completion_tokens", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty"];
const HIDDEN = new Set(["n", "best_of", "top_logprobs", "prompt_logprobs", "priority", "max_tokens", "truncate_prompt_tokens", "data_parallel_rank"]);
const KEPT = "tokamak.settings";

const empty = () => ({ model: "", system: "", fields: {}, stop: "", tools: "", choice: "", schema: "", thinking: "" });
const state = { sets: [empty(), empty()], shown: 0, compare: false, logprobs: false };
let fields = [];
let models = [];
let modalities = ["text"];
let adminKey = "";

export const adminKeyOf = () => adminKey;
export const isCompared = () => state.compare;
export const modelShown = () => models[0];
export const modelAsked = () => (state.compare ? state.sets : state.sets.slice(0, 1)).map(({ model }) => model || models[0] || "")
  .filter((name, index, all) => name && all.indexOf(name) === index).join(", ");
export const modalitiesTaken = () => modalities;
export const isLoaded = () => models.length > 0;

// Returns {name, minimum, maximum, isInteger} for each numeric field of a chat request.
function numbersOf(document) {
  const found = [];
  const shapes = document.paths["/v1/chat/completions"].post.requestBody.content["application/json"].schema;
  for (const { $ref } of shapes.allOf || [shapes]) {
    const properties = document.components.schemas[$ref.split("/").pop()].properties;
    for (const [name, property] of Object.entries(properties)) {
      const kind = (property.anyOf || [property]).find(({ type }) => type === "number" || type === "integer");
      if (!kind || HIDDEN.has(name)) continue;
      found.push({ name, minimum: kind.minimum ?? kind.exclusiveMinimum, maximum: kind.maximum ?? kind.exclusiveMaximum, isInteger: kind.type === "integer" });
    }
  }
  const place = ({ name }) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
  return found.sort((a, b) => place(a) - place(b));
}

// Returns the request body of a set, without messages. Throws if a JSON field cannot be parsed.
export function bodyOf(index) {
  const set = state.sets[index];
  const body = { model: set.model || models[0], stream: true, stream_options: { include_usage: true } };
  for (const { name } of fields) if (set.fields[name] !== undefined && set.fields[name] !== "") body[name] = Number(set.fields[name]);
  if (set.stop) body.stop = set.stop.split("\n").filter(Boolean);
  if (set.tools.trim()) {
    body.tools = parsed(set.tools, "tools");
    if (set.choice) body.tool_choice = set.choice;
  }
  if (set.schema.trim()) {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parsed(set.schema, "JSON Schema"), strict: true } };
  }
  if (set.thinking) body.chat_template_kwargs = { enable_thinking: set.thinking === "on" };
  if (state.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return body;
}

export const systemOf = (index) => state.sets[index].system.trim();

function parsed(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what}: invalid JSON: ${error.message}`);
  }
}

function keepAll() {
  localStorage.setItem(KEPT, JSON.stringify(state));
}

function labelled(text, input, title = "") {
  input.addEventListener("change", keepAll);
  return make("label", { title }, make("span", {}, text), input);
}

function area(text, name, placeholder, rows = 3) {
  const set = state.sets[state.shown];
  const input = make("textarea", { value: set[name], rows, placeholder, spellcheck: false, oninput: () => { set[name] = input.value; } });
  return labelled(text, input);
}

function number({ name, minimum, maximum, isInteger }) {
  const set = state.sets[state.shown];
  const range = minimum === undefined && maximum === undefined ? "" : `${minimum ?? "…"} to ${maximum ?? "…"}`;
  const isWide = Math.max(Math.abs(minimum ?? 0), Math.abs(maximum ?? 0)) > 1e6;
  const input = make("input", {
    type: "number", value: set.fields[name] ?? "", min: minimum ?? "", max: maximum ?? "", step: isInteger ? 1 : "any",
    placeholder: isWide ? "default" : range || "default",
    oninput: () => { set.fields[name] = input.value; input.reportValidity(); },
  });
  return labelled(name.replaceAll("_", " "), input, range);
}

// Redraws the fields.
export function draw() {
  const set = state.sets[state.shown];
  const tab = (index, text) => make("button", {
    type: "button", "aria-pressed": String(state.shown === index), onclick: () => { state.shown = index; draw(); },
  }, text);
  const model = make("select", { onchange: () => { set.model = model.value; } }, ...models.map((name) => new Option(name, name, false, name === set.model)));
  const thinking = make("select", { onchange: () => { set.thinking = thinking.value; } },
    ...[["", "default"], ["on", "on"], ["off", "off"]].map(([value, text]) => new Option(text, value, false, value === set.thinking)));
  const choice = make("select", { onchange: () => { set.choice = choice.value; } },
    ...[["", "auto"], ["required", "required"], ["none", "none"]].map(([value, text]) => new Option(text, value, false, value === set.choice)));
  const compare = make("input", { type: "checkbox", checked: state.compare, onchange: () => { state.compare = compare.checked; if (!state.compare) state.shown = 0; draw(); } });
  const logprobs = make("input", { type: "checkbox", checked: state.logprobs, onchange: () => { state.logprobs = logprobs.checked; } });
  const secret = (id, text, title, set) => make("label", { title }, make("span", {}, text),
    make("input", { id, type: "password", autocomplete: "off", placeholder: "if required", value: sessionStorage.getItem(id) || "", onchange: (event) => { sessionStorage.setItem(id, event.target.value); set(event.target.value); } }));
  $("settings").replaceChildren(make("div", {},
    make("h2", {}, "Server"),
    secret("api-key", "API key", "Stored until this tab is closed", (value) => { setKey(value); models = []; }),
    secret("admin-key", "admin key", "Required for commands; stored until this tab is closed", (value) => { adminKey = value; }),
    make("h2", {}, "Request"),
    labelled("compare two settings", compare), labelled("show token probabilities", logprobs),
    state.compare ? make("div.row.tabs", { role: "group", "aria-label": "Settings to edit" }, tab(0, "Left"), tab(1, "Right")) : null,
    labelled("model", model), area("system prompt", "system", "none"), labelled("thinking", thinking),
    ...fields.slice(0, FIRST.length).map(number),
    area("stop sequences, one per line", "stop", "none", 2),
    area("tools (JSON array)", "tools", '[{"type": "function", "function": {"name": "…", "parameters": {…}}}]', 4),
    labelled("tool choice", choice),
    area("response format (JSON Schema)", "schema", '{"type": "object", …}', 4),
    fields.length > FIRST.length ? make("details", { open: $("settings").querySelector("details")?.open ?? false }, make("summary", {}, "Advanced"), ...fields.slice(FIRST.length).map(number)) : null,
  ));
}

// Loads the models and request fields of the server. Throws `ServerError`.
export async function load() {
  const [list, document] = await Promise.all([get("v1/models"), get("openapi.json")]);
  models = list.data.map(({ id }) => id);
  modalities = list.data[0].input_modalities;
  fields = numbersOf(document);
  draw();
}

export function restore() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEPT) || "{}");
    if (Array.isArray(kept.sets)) kept.sets.slice(0, 2).forEach((set, index) => Object.assign(state.sets[index], set));
    state.compare = Boolean(kept.compare);
    state.logprobs = Boolean(kept.logprobs);
  } catch { /* saved by another version: use the defaults */ }
  setKey(sessionStorage.getItem("api-key") || "");
  adminKey = sessionStorage.getItem("admin-key") || "";
}
