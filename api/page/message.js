// One message: its text, reasoning, tool calls, images, token probabilities, and buttons.

import { shownPart } from "./attachments.js";
import { iconButton, make } from "./dom.js";
import { copied, rendered } from "./markdown.js";

const NAMES = { user: "You", assistant: "Assistant", tool: "Tool" };

// `actions`: {edit, regenerate, proceed, choose, result}, each called with the node; `place`: [number, count] among its branches.
export function shownMessage(node, place, isBusy, actions) {
  const body = make("div.body");
  fill(body, node);
  const box = make(`article.turn.${node.role}`, { "aria-label": NAMES[node.role] }, body);
  for (const call of node.calls || []) box.append(shownCall(node, call, isBusy, actions));
  if (node.error) box.append(make("p.error", { role: "alert" }, node.error));
  const row = make("div.row.actions");
  if (place[1] > 1) {
    row.append(iconButton("before", "Previous branch", "", () => actions.choose(node, -1)), make("span", {}, `${place[0]} of ${place[1]}`),
      iconButton("next", "Next branch", "", () => actions.choose(node, 1)));
  }
  if (node.note) row.append(make("small", {}, node.note));
  if (!isBusy) {
    const icons = make("span.icons", {}, iconButton("copy", "Copy", "Copy message", () => copied(node.content)));
    if (node.role === "user") icons.append(iconButton("edit", "Edit", "Edit in a new branch", () => actions.edit(node, box)));
    if (node.role === "assistant") {
      icons.append(iconButton("again", "Regenerate", "Regenerate in a new branch", () => actions.regenerate(node)));
      if (node.content && !node.calls) icons.append(iconButton("proceed", "Continue", "Continue generating", () => actions.proceed(node)));
    }
    row.append(icons);
  }
  box.append(row);
  return box;
}

// Redraws the body of a message; called for each piece of a streamed answer.
export function fill(body, node) {
  const shown = [];
  if (node.parts?.length) shown.push(make("div.pictures", {}, ...node.parts.map(shownPart)));
  if (node.reasoning) {
    const isOpen = body.querySelector("details.thought")?.open ?? false;
    shown.push(make("details.thought", { open: isOpen }, make("summary", {}, node.content || node.calls ? "Reasoning" : "Thinking…"), make("div.plain-text", {}, node.reasoning)));
  }
  if (node.tokens?.length) shown.push(shownTokens(node));
  else if (node.role === "assistant") shown.push(rendered(node.content));
  else shown.push(make("div.plain-text", {}, node.content));
  if (node.progress && node.progress.total) {
    const { processed, total } = node.progress;
    shown.push(make("div.reading", {}, make("progress", { value: processed, max: total, "aria-label": "Prompt processed" }), `processing the prompt: ${processed} of ${total} tokens`));
  } else if (node.isOpen && !node.content && !node.reasoning && !node.calls) shown.push(make("span.waiting", {}, "…"));
  body.replaceChildren(...shown);
}

// Tokens coloured by probability, with the alternatives on hover and focus.
function shownTokens({ tokens, content, isOpen }) {
  const text = make("div.tokens");
  for (const [index, [token, logprob, top]] of tokens.entries()) {
    const isEnd = !isOpen && index === tokens.length - 1 && !content.endsWith(token);
    const share = Math.exp(logprob);
    const level = share > 0.9 ? 0 : share > 0.6 ? 1 : share > 0.3 ? 2 : share > 0.1 ? 3 : 4;
    const told = (value) => `${JSON.stringify(value[0])} ${(100 * Math.exp(value[1])).toFixed(1)} %`;
    text.append(make(`span.p${level}`, { tabIndex: 0, title: [told([token, logprob]), ...top.map(told)].join("\n"), "aria-label": told([token, logprob]) }, isEnd ? "■" : token));
  }
  return text;
}

function shownCall(node, call, isBusy, actions) {
  let text = call.arguments;
  try { text = JSON.stringify(JSON.parse(call.arguments), null, 2); } catch { /* incomplete, or not JSON */ }
  const box = make("div.call", {}, make("strong", {}, call.name), make("pre", {}, text));
  if (isBusy || node.answered?.includes(call.id)) return box;
  const field = make("textarea", { rows: 2, placeholder: "Function result", "aria-label": `Result of ${call.name}` });
  box.append(make("div.row", {}, field, make("button", { type: "button", onclick: () => actions.result(node, call, field.value) }, "Submit result")));
  return box;
}
