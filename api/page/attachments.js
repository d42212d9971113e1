// Images and videos attached to a message by choosing, dropping or pasting a file; sent inside the request.

import { $, make } from "./dom.js";

let attached = [];
let taken = ["image", "video"];
let reason = ""; // why some files cannot be attached

export const shownPart = (part) => (part.image_url
  ? make("img", { src: part.image_url.url, alt: "attached image" })
  : make("video", { src: part.video_url.url, controls: true }));

export function take() {
  const parts = attached;
  put([]);
  return parts;
}

export function put(parts) {
  attached = [...parts];
  $("files").replaceChildren(...attached.map((part, index) => make("button.attached", {
    type: "button", title: "Remove", "aria-label": `Remove attachment ${index + 1}`,
    onclick: () => put(attached.filter((other) => other !== part)),
  }, part.image_url ? shownPart(part) : "video")));
}

// Sets which of text, image and video the model accepts. For a text model the button stays visible and says why it is disabled.
export function allow(modalities, model) {
  taken = modalities.filter((kind) => kind !== "text");
  reason = `${model} accepts ${modalities.join(" and ")} only`;
  $("file").accept = taken.map((kind) => `${kind}/*`).join(",");
  $("attach").setAttribute("aria-disabled", String(!taken.length));
  const text = taken.length ? "Attach images or video" : `Attachments are not supported: ${reason}`;
  $("attach").setAttribute("aria-label", text);
  $("attach").title = taken.length ? `${text} (or drag and drop, or paste)` : text;
}

export const refusal = () => (taken.length ? "" : reason);

export const any = () => attached.length > 0;

// Attaches files. Returns one error message for each file that is not an image or video, or that the model does not accept.
export async function add(files) {
  const problems = [];
  for (const file of files) {
    const kind = /^(image|video)\//.exec(file.type)?.[1];
    if (!kind) { problems.push(`${file.name}: not an image or a video`); continue; }
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
