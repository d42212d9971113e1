// The open conversation and its actions, and the list of conversations.

import * as attachments from "./attachments.js";
import { receive } from "./answer.js";
import { $, button, download, iconButton, make } from "./dom.js";
import { fill, shownMessage } from "./message.js";
import * as settings from "./settings.js";
import * as store from "./store.js";
import * as trees from "./tree.js";

const MIN_REDRAW_MS = 50;
const KEEP_MS = 1000;  // how often an unfinished answer is saved
const OPENED = "tokamak.opened";  // the conversation open in this tab
const STARTERS = ["What are you?", "What is 12 + 345?", "Explain in two sentences what a KV cache is.", "Write a Python function that reverses a list."];
const OF_EMBEDDED = {  // questions that these small models can answer
  "tokamak-demo": ["What are you?", "What is 12 + 345?", "Reverse the word planet", "What is Tokamak?"],
};

let tree = trees.begin();
let kept = [];
let running = null;  // aborts the running requests

const isBusy = () => running !== null;

// ---- asking

async function ask(text) {
  const parts = attachments.take();
  const last = trees.path(tree).at(-1)?.id ?? "";
  const node = trees.add(tree, last, { role: "user", content: text, parts });
  await answer(node.id);
}

// Requests one answer, or two side by side, to the conversation up to node `id`.
async function answer(id) {
  const sets = settings.isCompared() ? [0, 1] : [0];
  const jobs = [];
  try {
    for (const set of sets) jobs.push({ body: { ...settings.bodyOf(set), return_progress: true, messages: trees.messages(tree, id, settings.systemOf(set)) } });
  } catch (error) {
    return fail(error.message);
  }
  for (const job of jobs) job.node = trees.add(tree, id, { role: "assistant", content: "", isOpen: true });
  return run(jobs);
}

async function proceed(node) {
  let body;
  try {
    body = settings.bodyOf(0);
  } catch (error) {
    return fail(error.message);
  }
  delete node.error;
  delete node.tokens;
  Object.assign(body, { messages: trees.messages(tree, node.id, settings.systemOf(0)), add_generation_prompt: false, continue_final_message: true });
  return run([{ node, body }]);
}

async function run(jobs) {
  running = new AbortController();
  $("send").textContent = "Stop";
  const mine = tree;
  remember();
  keep(mine);
  const keeping = setInterval(() => store.keep(mine).catch(() => {}), KEEP_MS);
  draw(jobs.length > 1 ? jobs.map((job) => job.node) : []);
  await Promise.all(jobs.map((job) => stream(job)));
  clearInterval(keeping);
  running = null;
  $("send").textContent = "Send";
  await keep(mine);
  if (tree === mine) draw(jobs.length > 1 ? jobs.map((job) => job.node) : []);
}

async function stream({ node, body }) {
  node.isOpen = true;
  let last = 0;
  let timer = 0;
  const redraw = () => {
    timer = 0;
    const begun = performance.now();
    const place = document.querySelector(`[data-node="${node.id}"] .body`);
    if (!place) return;
    const isAtEnd = $("talk").scrollHeight - $("talk").scrollTop - $("talk").clientHeight < 80;
    fill(place, node);
    if (isAtEnd) $("talk").scrollTop = $("talk").scrollHeight;
    last = performance.now() - begun;
  };
  try {
    await receive(node, body, running.signal, () => { timer ||= setTimeout(redraw, Math.max(MIN_REDRAW_MS, 4 * last)); });
  } catch (error) {
    node.note = "";
    if (error.name === "AbortError") node.note = "stopped";
    else node.error = error.message;
  }
  clearTimeout(timer);
  delete node.isOpen;
  delete node.progress;
}

// ---- buttons of a message

const actions = {
  edit(node, box) {
    const field = make("textarea", { value: node.content, rows: Math.min(12, node.content.split("\n").length + 1), "aria-label": "Edit message" });
    const done = () => {
      const other = trees.add(tree, node.parent, { role: "user", content: field.value, parts: node.parts });
      return answer(other.id);
    };
    const send = make("button", { type: "button", onclick: done }, "Send");
    box.replaceChildren(field, make("div.row", {}, send, button("Cancel", "Cancel editing", () => draw())));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") draw();
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send.click();
    });
    field.focus();
  },
  regenerate: (node) => answer(node.parent),
  proceed,
  choose(node, step) {
    trees.choose(tree, node, step);
    draw();
    keep(tree);
  },
  result(node, call, text) {
    node.answered = [...(node.answered || []), call.id];
    const last = trees.path(tree).at(-1);
    const told = trees.add(tree, last.id, { role: "tool", content: text, call: call.id });
    if (node.calls.every(({ id }) => node.answered.includes(id))) return answer(told.id);
    return draw();
  },
};

// ---- showing

function draw(compared = []) {
  const isOpen = isBusy();
  const shown = trees.path(tree).filter((node) => !compared.some((other) => other.parent === node.parent));
  const boxes = shown.map((node) => placed(node, isOpen));
  if (compared.length) boxes.push(make("div.compared", {}, ...compared.map((node) => placed(node, isOpen))));
  if (!boxes.length) boxes.push(shownStart());
  $("talk").replaceChildren(...boxes);
  $("talk").scrollTop = $("talk").scrollHeight;
}

// Shows the suggested questions of the selected model.
export function redrawStart() {
  if ($("talk").querySelector(".start")) draw();
}

function shownStart() {
  const questions = OF_EMBEDDED[settings.modelAsked()] || STARTERS;
  const starters = questions.map((text) => make("button.starter", { type: "button", onclick: () => { if (!isBusy()) ask(text); } }, text));
  return make("div.start", {}, make("p.hint", {}, "How can I help you today? Chats are stored only in this browser."), make("div.starters", {}, ...starters));
}

function placed(node, isOpen) {
  const siblings = trees.children(tree, node.parent);
  const box = shownMessage(node, [siblings.findIndex(({ id }) => id === node.id) + 1, siblings.length], isOpen, actions);
  box.dataset.node = node.id;
  return box;
}

export function fail(message) {
  $("talk").append(make("p.error", { role: "alert" }, message));
  $("talk").scrollTop = $("talk").scrollHeight;
}

// ---- the list of conversations

async function keep(one) {
  try {
    await store.keep(one);
    kept = await store.all();
  } catch (error) {
    fail(`cannot save the chat in this browser: ${error.message}`);
  }
  list();
}

function list() {
  const words = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  $("conversations").replaceChildren(...kept.filter((one) => store.holds(one, words)).map((one) => make("li", {},
    make("button.title", { type: "button", title: one.title, "aria-current": String(one.id === tree.id), onclick: () => open(one) }, one.title || "New chat"),
    make("span.icons", {},
      iconButton("export", `Export ${one.title}`, "Export", () => download(`${one.title || "chat"}.json`, JSON.stringify(one))),
      iconButton("written", `Export ${one.title} as Markdown`, "Export as Markdown", () => download(`${one.title || "chat"}.md`, trees.asMarkdown(one))),
      iconButton("delete", `Delete ${one.title}`, "Delete", () => remove(one))))));
}

function open(one) {
  running?.abort();
  tree = structuredClone(one);
  for (const node of Object.values(tree.nodes)) if (node.isOpen) cutOff(node);
  remember();
  document.body.classList.remove("list-open");
  draw();
  list();
  $("input").focus();
}

// Marks an answer as incomplete whose page was left or reloaded while it was streaming; its text is kept.
function cutOff(node) {
  delete node.isOpen;
  delete node.progress;
  node.note = "interrupted: the page was closed or reloaded; select Continue to resume";
}

function remember() {
  try {
    sessionStorage.setItem(OPENED, tree.id);
  } catch { /* without storage: a reload starts a new chat */ }
}

async function remove(one) {
  if (!confirm(`Delete "${one.title}"?`)) return;
  await store.forget(one.id);
  kept = kept.filter((other) => other.id !== one.id);
  if (tree.id === one.id) open(trees.begin());
  else list();
}

async function read(file) {
  let found;
  try {
    found = JSON.parse(await file.text());
  } catch {
    found = null;
  }
  if (!trees.isTree(found)) return fail(`${file.name}: not an exported chat; use a JSON file made with Export`);
  await keep({ ...found, id: crypto.randomUUID() });
  return open(kept[0]);
}

// ---- beginning

export async function begin() {
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return void running.abort();
    const text = $("input").value.trim();
    if (!text && !attachments.any()) return undefined;
    $("input").value = "";
    return ask(text);
  });
  $("input").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!running) $("form").requestSubmit();
    }
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
  const attach = async (files) => { for (const problem of await attachments.add(files)) fail(problem); };
  $("attach").addEventListener("click", () => (attachments.refusal() ? fail(attachments.refusal()) : $("file").click()));
  $("file").addEventListener("change", async () => { await attach($("file").files); $("file").value = ""; });
  $("input").addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    attach(event.clipboardData.files);
  });
  for (const kind of ["dragover", "dragleave", "drop"]) {
    $("main").addEventListener(kind, (event) => {
      event.preventDefault();
      $("main").classList.toggle("dropping", kind === "dragover");
      if (kind === "drop") attach(event.dataTransfer.files);
    });
  }
  $("new").addEventListener("click", () => open(trees.begin()));
  $("find").addEventListener("input", list);
  $("import").addEventListener("click", () => $("import-file").click());
  $("import-file").addEventListener("change", async () => {
    if ($("import-file").files[0]) await read($("import-file").files[0]);
    $("import-file").value = "";
  });
  addEventListener("pagehide", () => { if (running) store.keep(tree).catch(() => {}); });
  draw();
  try {
    kept = await store.all();
    const shown = kept.find(({ id }) => id === sessionStorage.getItem(OPENED));
    if (shown) open(shown);
  } catch { /* without storage: no saved chats */ }
  list();
}
