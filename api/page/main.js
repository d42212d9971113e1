// Entry point: starts both views and the status line. The chat is in chat.js, the dashboard in dashboard.js.

import * as attachments from "./attachments.js";
import { begin, fail, redrawStart } from "./chat.js";
import { look } from "./dashboard.js";
import { $ } from "./dom.js";
import * as settings from "./settings.js";

function show(view) {
  for (const name of ["chat", "engine"]) {
    $(name).hidden = name !== view;
    $(`show-${name}`).setAttribute("aria-pressed", String(name === view));
  }
  location.hash = view === "engine" ? "engine" : "";
}

function toggle(id, isOpen) {
  $(`open-${id}`).setAttribute("aria-expanded", String(isOpen));
}

async function watch() {
  const [kind, text] = await look();
  $("status").className = kind;
  if ($("status").textContent !== text) $("status").textContent = text;
  if (kind === "ok" && !settings.isLoaded()) await load();
  setTimeout(watch, document.hidden ? 5000 : 1000);
}

function showModel() {
  const name = settings.modelAsked();
  $("model").textContent = name;
  $("model").title = name;
  redrawStart();
}

async function load() {
  try {
    await settings.load();
    showModel();
    attachments.allow(settings.modalitiesTaken(), settings.modelShown());
  } catch (error) {
    if (error.status > 0 && error.status !== 401) fail(error.message);
  }
}

$("show-chat").addEventListener("click", () => show("chat"));
$("show-engine").addEventListener("click", () => show("engine"));
$("open-settings").addEventListener("click", () => {
  $("settings").hidden = !$("settings").hidden;
  toggle("settings", !$("settings").hidden);
});
$("open-list").addEventListener("click", () => toggle("list", document.body.classList.toggle("list-open")));

$("settings").addEventListener("change", showModel);

settings.restore();
settings.draw();
await begin();
await load();
if (location.hash === "#engine") show("engine");
watch();
