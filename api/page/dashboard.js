// Dashboard of the engine's metrics: polled each second, with a history of a few minutes.

import { $, make } from "./dom.js";
import { line } from "./lines.js";
import { command, get, health } from "./server.js";
import { adminKeyOf } from "./settings.js";

const KEPT_LOOKS = 300;
const looks = [];
let isDrawn = false;
let openLog = "";
let told = "";

const count = (value) => (value ?? 0).toLocaleString("en");
const share = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`);
const rate = (value) => (value === null || value === undefined ? "–" : value < 10 ? value.toFixed(1) : count(Math.round(value)));
const bytes = (value) => (value === null ? "–" : value > 1 << 30 ? `${(value / 2 ** 30).toFixed(2)} GiB` : `${Math.round(value / 2 ** 20)} MiB`);
function seconds(value) {
  if (value === null || value === undefined) return "–";
  return value < 1e-3 ? `${(1e6 * value).toFixed(0)} µs` : value < 1 ? `${(1e3 * value).toFixed(value < 0.01 ? 2 : 0)} ms` : `${value.toFixed(1)} s`;
}

// Polls the server and returns [kind, text] for the status line.
export async function look() {
  const begun = performance.now();
  try {
    const [{ status, actor, reason }, document] = await Promise.all([health(), get("dashboard")]);
    looks.push({ figures: document.figures, at: Date.now() });
    if (looks.length > KEPT_LOOKS) looks.shift();
    if (!$("engine").hidden) draw(document);
    const slow = performance.now() - begun > 2000;
    if (status !== "ok") return ["bad", `${actor} ${reason}`];
    return slow ? ["slow", `slow: responds in ${seconds((performance.now() - begun) / 1000)}`] : ["ok", "all actors healthy"];
  } catch (error) {
    looks.push({ figures: null, at: Date.now() });
    if (looks.length > KEPT_LOOKS) looks.shift();
    if (error.status === 0) return ["bad", "cannot reach the server: it is stopped or its address changed"];
    if (error.status === -1) return ["slow", "server is slow: no response within 8 s"];
    if (error.status === 401) return ["bad", "API key required: enter it in Settings"];
    return ["bad", error.message];
  }
}

function table(caption, head, rows) {
  return make("section", {}, make("h2", {}, caption), make("div.scroll", { tabIndex: 0, role: "region", "aria-label": caption }, make("table", {},
    make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col" }, text)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, cell))))))));
}

// `of` reads the value from the figures of one poll; `written` formats it with its unit.
function chart(label, value, of, written) {
  const values = looks.map(({ figures }) => (figures ? of(figures) ?? null : null));
  return make("div.chart", {}, make("span", {}, label), make("strong", {}, value), line(values, label, written, looks.at(-1).at - looks[0].at));
}

const perSecond = (value) => `${rate(value)} /s`;

function draw(found) {
  const { figures } = found;
  const used = figures.num_kv_blocks ? figures.num_used_kv_blocks / figures.num_kv_blocks : 0;
  const charts = make("section.charts", { "aria-label": "Metrics of the last minutes" },
    chart("generated tokens", perSecond(figures.generation_tokens_per_s), (f) => f.generation_tokens_per_s, perSecond),
    chart("prompt tokens", perSecond(figures.prompt_tokens_per_s), (f) => f.prompt_tokens_per_s, perSecond),
    chart("running requests", count(figures.num_running), (f) => f.num_running, count),
    chart("waiting requests", count(figures.num_waiting), (f) => f.num_waiting, count),
    chart("KV cache usage", share(used), (f) => (f.num_kv_blocks ? f.num_used_kv_blocks / f.num_kv_blocks : 0), share),
    chart("TTFT, p50", seconds(figures.latency.ttft.p50), (f) => f.latency.ttft.p50, seconds),
    chart("inter-token latency, p50", seconds(figures.latency.itl.p50), (f) => f.latency.itl.p50, seconds),
    chart("prefix cache hit rate", share(figures.prefix_hit_share), (f) => f.prefix_hit_share, share));
  const about = make("p", {}, `${found.model} on ${found.device}${found.kernels ? `, ${found.kernels}` : ""}; weight version ${figures.weight_version}, ${figures.engine_state}; ` +
    `${count(figures.num_cached_kv_blocks)} of ${count(figures.num_kv_blocks)} KV blocks cached, ${count(figures.num_preemptions)} preemptions, ${count(figures.num_resubmissions)} resubmissions`);
  const latency = table("Latency", ["", "count", "mean", "p50", "p90", "p99"], Object.entries({
    ttft: "time to first token", tpot: "time per output token", itl: "inter-token latency", e2e: "end to end",
  }).map(([name, text]) => { const one = figures.latency[name]; return [text, count(one.count), seconds(one.mean), seconds(one.p50), seconds(one.p90), seconds(one.p99)]; }));
  const step = table("Step time", ["phase", "mean", "share", "p99"],
    Object.entries(figures.step).map(([name, { time, share: part }]) => [name, seconds(time.mean), share(part), seconds(time.p99)]));
  const parts = [charts, about, actors(found), latency, step, table("Ring buffers", ["sender", "receiver", "fill", "records/s", "waits when full"],
    found.rings.map((ring) => [ring.sender, ring.receiver, share(ring.fill_bytes / ring.capacity_bytes), rate(figures.ring_records_per_s[`${ring.sender}>${ring.receiver}`]), count(ring.num_full_waits)]))];
  if (found.engines.length) parts.push(table("Engines", ["address", "state", "running", "waiting", "prefix hits", "routed", "resubmitted", "trouble"],
    found.engines.map((one) => [one.address, make(one.state === "ready" ? "span.ok" : "span.bad", {}, one.state), count(one.num_running), count(one.num_waiting),
      share(one.hit_share), count(one.num_routed), count(one.num_resubmitted), one.trouble])));
  if (found.experts.length) parts.push(table("Expert load", ["layer", "rows", "max/mean rank load", "hottest experts"],
    found.experts.map((load) => [load.layer, count(load.rows), load.imbalance.toFixed(2), load.hottest.map((hot) => hot.expert).join(", ")])));
  if (found.adapters.length) parts.push(table("LoRA adapters", ["name", "rank", "running", "waiting", "loaded"],
    found.adapters.map((one) => [one.name, one.rank, count(one.num_running), count(one.num_waiting),
      one.is_leaving ? "unloading" : new Date(one.loaded_at * 1000).toLocaleString()])));
  if (figures.drafts) parts.push(table("Speculative decoding", ["tokens per step", "acceptance by method", "acceptance by position"], [[figures.drafts.tokens_per_row.toFixed(2),
    Object.entries(figures.drafts.methods).map(([name, value]) => `${name} ${share(value)}`).join(", "), figures.drafts.accepted.map(share).join(", ")]]));
  parts.push(found.errors.length ? table("Errors", ["actor", "error", "count", "last seen"],
    found.errors.map((error) => [error.actor, error.text, count(error.count), `${seconds(error.last_age_s)} ago`])) : make("section", {}, make("h2", {}, "Errors"), make("p", {}, "none")));
  parts.push(commands(found));
  const { scrollTop } = $("engine");
  const focused = isDrawn ? document.activeElement?.dataset?.name : "";
  $("engine").replaceChildren(...parts, log);
  isDrawn = true;
  if (focused) $("engine").querySelector(`[data-name="${CSS.escape(focused)}"]`)?.focus();
  $("engine").scrollTop = scrollTop;
}

function actors(found) {
  const rows = found.actors.map((actor) => [
    actor.name, make(actor.is_alive && /READY|RUNNING/.test(actor.state) ? "span.ok" : "span.bad", {}, actor.is_alive ? actor.state.toLowerCase() : "dead"), actor.epoch, actor.restarts,
    seconds(actor.heartbeat_age_s), share(found.figures.cpu_share[actor.name]), bytes(actor.resident_bytes),
    named("button.plain", `log ${actor.name}`, { type: "button", onclick: () => showLog(actor.name) }, "log"),
  ]);
  return table("Actors", ["name", "state", "epoch", "restarts", "heartbeat", "CPU", "memory", ""], rows);
}

// A button that keeps the focus when the table is redrawn.
function named(kind, name, properties, text) {
  const made = make(kind, { ...properties, "aria-label": name }, text);
  made.dataset.name = name;
  return made;
}

const log = make("section", { hidden: true, "aria-live": "off" });

async function showLog(name) {
  openLog = openLog === name ? "" : name;
  log.hidden = !openLog;
  if (!openLog) return;
  const { text } = await get(`dashboard/logs/${encodeURIComponent(name)}`).catch((error) => ({ text: error.message }));
  log.replaceChildren(make("h2", {}, `Log of ${name}`), make("pre.log", { tabIndex: 0 }, text || "(empty)"));
  log.scrollIntoView({ block: "nearest" });
}

function commands(found) {
  const box = make("section", {}, make("h2", {}, "Commands"));
  if (!found.has_admin_key) {
    box.append(make("p", {}, "Commands are disabled: start the server with --admin-key, or run tokamak ctl on its machine."));
    return box;
  }
  if (!adminKeyOf()) {
    box.append(make("p", {}, "Enter the admin key in Settings to pause, resume or restart."));
    return box;
  }
  const give = (path, body = {}) => async () => {
    told = await command(`admin/${path}`, body, adminKeyOf()).then((answer) => answer.message, (error) => error.message);
  };
  box.append(make("div.row", {},
    named("button.plain", "Pause", { type: "button", onclick: give("pause") }, "Pause"), named("button.plain", "Resume", { type: "button", onclick: give("resume") }, "Resume"),
    named("button.plain", "Clear prefix cache", { type: "button", onclick: give("reset_prefix_cache") }, "Clear prefix cache"),
    ...found.actors.filter((actor) => actor.name !== "supervisor").map((actor) => named("button.plain", `Restart ${actor.name}`, { type: "button", onclick: give(`actors/${actor.name}/restart`) }, `Restart ${actor.name}`))),
  make("p", { role: "status" }, told));
  return box;
}
