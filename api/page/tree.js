// Conversation: a tree of messages with one path shown. Editing and regenerating add branches; messages are never overwritten.
// Plain data, stored as it is: {id, title, changed, next, nodes: {id: node}, root: [ids], chosen: {parent: id}}.
// A node: {id, parent, role, content, parts, reasoning, calls, call, tokens, note, error}; parent "" is the root.

export const begin = () => ({ id: crypto.randomUUID(), title: "", changed: Date.now(), next: 1, nodes: {}, chosen: {} });

export function add(tree, parent, node) {
  const id = String(tree.next++);
  tree.nodes[id] = { ...node, id, parent };
  tree.chosen[parent] = id;
  tree.changed = Date.now();
  if (!tree.title && node.role === "user") tree.title = node.content.replace(/\s+/g, " ").slice(0, 120) || "Images";
  return tree.nodes[id];
}

export const children = (tree, parent) => Object.values(tree.nodes).filter((node) => node.parent === parent);

// Returns the nodes of the shown path, first to last.
export function path(tree) {
  const shown = [];
  for (let id = tree.chosen[""]; id && tree.nodes[id]; id = tree.chosen[id]) shown.push(tree.nodes[id]);
  return shown;
}

// Returns the nodes up to and including `id`.
export function upTo(tree, id) {
  const found = [];
  for (let node = tree.nodes[id]; node; node = tree.nodes[node.parent]) found.unshift(node);
  return found;
}

export function choose(tree, node, step) {
  const siblings = children(tree, node.parent);
  const place = siblings.findIndex((other) => other.id === node.id) + step;
  if (siblings[place]) tree.chosen[node.parent] = siblings[place].id;
}

export function drop(tree, id) {
  for (const child of children(tree, id)) drop(tree, child.id);
  const { parent } = tree.nodes[id];
  delete tree.nodes[id];
  delete tree.chosen[id];
  const left = children(tree, parent);
  if (tree.chosen[parent] === id) {
    if (left.length) tree.chosen[parent] = left[left.length - 1].id;
    else delete tree.chosen[parent];
  }
}

// Returns the nodes up to `id` as API messages.
export function messages(tree, id, system) {
  const list = system ? [{ role: "system", content: system }] : [];
  for (const node of upTo(tree, id)) {
    if (node.role === "tool") list.push({ role: "tool", tool_call_id: node.call, content: node.content });
    else if (node.role === "user") {
      list.push({ role: "user", content: node.parts?.length ? [...node.parts, { type: "text", text: node.content }] : node.content });
    } else {
      const message = { role: "assistant", content: node.content };
      if (node.reasoning) message.reasoning_content = node.reasoning;
      if (node.calls?.length) {
        message.tool_calls = node.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
      }
      list.push(message);
    }
  }
  return list;
}

export function asMarkdown(tree) {
  const names = { user: "You", assistant: "Assistant", tool: "Tool" };
  const told = path(tree).map((node) => {
    const calls = (node.calls || []).map((call) => `\n\n    ${call.name}(${call.arguments})`).join("");
    return `## ${names[node.role]}\n\n${node.content}${calls}\n`;
  });
  return [`# ${tree.title}\n`, ...told].join("\n");
}

const ROLES = new Set(["user", "assistant", "tool"]);
const isText = (value) => value === undefined || value === null || typeof value === "string";

// Returns whether the parsed content of a file is a conversation.
export function isTree(value) {
  return Boolean(value) && typeof value.id === "string" && typeof value.title === "string" && Number.isInteger(value.next) &&
    typeof value.nodes === "object" && typeof value.chosen === "object" && value.nodes !== null && value.chosen !== null &&
    Object.entries(value.nodes).every(([id, node]) => node && node.id === id && ROLES.has(node.role) && typeof node.content === "string" &&
      typeof node.parent === "string" && (node.parent === "" || (node.parent in value.nodes && Number(node.parent) < Number(id))) &&
      isText(node.reasoning) && isText(node.note) && isText(node.error) &&
      (node.parts || []).every((part) => /^data:(image|video)\//.test(part?.image_url?.url || part?.video_url?.url || "")) &&
      (node.calls || []).every((call) => [call?.id, call?.name, call?.arguments].every((text) => typeof text === "string")));
}
