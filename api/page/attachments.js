// Pictures and video on their way into a message: chosen, dropped or pasted; sent inside the request.

import { $, make } from "./dom.js";

let attached = [];
let taken = ["image", "video"];
let reason = ""; // why a kind is not taken

export const shownPart = (part) => (part.image_url
  ? make("img", { src: part.image_url.url, alt: "attached picture" })
  : make("video", { src: part.video_url.url, controls: true }));

export function take() {
  const parts = attached;
  put([]);
  return parts;
}

export function put(parts) {
  attached = [...parts];
  $("files").replaceChildren(...attached.map((part, index) => make("button.attached", {
    type: "button", title: "Take it away", "aria-label": `Take attachment ${index + 1} away`,
    onclick: () => put(attached.filter((other) => other !== part)),
  }, part.image_url ? shownPart(part) : "video")));
}

// What the model takes, of text, image and video. The button stays where it is and says why it takes nothing.
export function allow(modalities, model) {
  taken = modalities.filter((kind) => kind !== "text");
  reason = `${model} takes ${modalities.join(" and ")} alone`;
  $("file").accept = taken.map((kind) => `${kind}/*`).join(",");
  $("attach").setAttribute("aria-disabled", String(!taken.length));
  const text = taken.length ? "Attach pictures or video" : `Nothing can be attached: ${reason}`;
  $("attach").setAttribute("aria-label", text);
  $("attach").title = taken.length ? `${text}; they can be dropped and pasted, too` : text;
}

export const refusal = () => (taken.length ? "" : reason);

export const any = () => attached.length > 0;

// Reads files. Gives what is wrong with those that are neither, or that the model does not take.
export async function add(files) {
  const problems = [];
  for (const file of files) {
    const kind = /^(image|video)\//.exec(file.type)?.[1];
    if (!kind) { problems.push(`${file.name} is no picture and no video`); continue; }
    if (!taken.includes(kind)) { problems.push(`${file.name}: ${reason}`); continue; }
    try {
      put([...attached, { type: `${kind}_url`, [`${kind}_url`]: { url: await dataUrl(file) } }]);
    } catch (error) {
      problems.push(`${file.name}: ${error.message}`);
    }
  }
  return problems;
}

const dataUrl = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});
