// Streaming of one answer: adds the events of the stream to a node of the conversation.

import { stream } from "./server.js";

const MAX_KEPT_TOKENS = 4000;
const LEAST_TIMED_S = 0.02;  // an answer that arrives at once has no rate

// Appends the answer to `node` and calls `changed` after each event.
export async function receive(node, body, signal, changed) {
  const begun = performance.now();
  let first = 0;
  let usage = null;
  for await (const event of stream("v1/chat/completions", body, signal)) {
    usage = event.usage || usage;
    if (event.prompt_progress) node.progress = event.prompt_progress;
    for (const choice of event.choices) {
      if (!first && hasText(choice.delta)) first = performance.now();
      take(node, choice);
    }
    changed();
  }
  delete node.progress;
  const seconds = (performance.now() - first) / 1000;
  const parts = [];
  if (first) parts.push(`TTFT ${Math.round(first - begun)} ms`);
  if (usage) parts.push(`${usage.completion_tokens} tokens`);
  if (usage?.completion_tokens > 1 && seconds > LEAST_TIMED_S) parts.push(`${Math.round((usage.completion_tokens - 1) / seconds)} tokens/s`);
  if (usage?.prompt_tokens_details?.cached_tokens) parts.push(`${usage.prompt_tokens_details.cached_tokens} of ${usage.prompt_tokens} prompt tokens cached`);
  if (node.finish && node.finish !== "stop" && node.finish !== "tool_calls") parts.push(`finish reason: ${node.finish}`);
  node.note = parts.join(", ");
  changed();
}

const hasText = (delta) => Boolean(delta.content || delta.reasoning_content || delta.tool_calls);

function take(node, { delta, logprobs, finish_reason: finish }) {
  delete node.progress;
  node.content += delta.content || "";
  if (delta.reasoning_content) node.reasoning = (node.reasoning || "") + delta.reasoning_content;
  for (const piece of delta.tool_calls || []) {
    node.calls ||= [];
    const call = (node.calls[piece.index] ||= { id: "", name: "", arguments: "" });
    call.id ||= piece.id || "";
    call.name += piece.function?.name || "";
    call.arguments += piece.function?.arguments || "";
  }
  for (const { token, logprob, top_logprobs: top } of logprobs?.content || []) {
    node.tokens ||= [];
    if (node.tokens.length < MAX_KEPT_TOKENS) node.tokens.push([token, logprob, top.map((other) => [other.token, other.logprob])]);
  }
  if (finish) node.finish = finish;
}
