// Functions of the tests, run in the page.

const seen = (selector) => [...document.querySelectorAll(selector)].filter((one) => one.checkVisibility());

// Returns elements below `selector` that model output must never create.
function dangerous(selector) {
  const all = [...document.querySelectorAll(`${selector} *`)];
  const tags = /^(script|iframe|img|object|embed|form|style|link|base|meta|svg|math|video|audio)$/i;
  return [
    ...all.filter((one) => tags.test(one.tagName)),
    ...all.filter((one) => [...one.attributes].some(({ name }) => /^on|^style$|^src/i.test(name))),
    ...all.filter((one) => one.hasAttribute("href") && !/^(https?:|mailto:)/.test(one.href)),
  ].map((one) => one.outerHTML.slice(0, 120));
}

// Returns controls without an accessible name.
function nameless() {
  return seen("button, input, select, textarea, [role=region], [role=log], [role=group]")
    .filter((one) => !(one.getAttribute("aria-label") || one.textContent.trim() || one.closest("label")?.textContent.trim()))
    .map((one) => one.outerHTML.slice(0, 120));
}

function luminance(color) {
  const [r, g, b] = color.match(/[\d.]+/g).slice(0, 3).map((part) => {
    const share = part / 255;
    return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function ground(element) {
  for (let one = element; one; one = one.parentElement) {
    const color = getComputedStyle(one).backgroundColor;
    if (!/, 0\)$/.test(color)) return color;
  }
  return "rgb(255, 255, 255)";
}

// Returns texts with a contrast below 4.5, the minimum of WCAG AA.
function pale() {
  return seen("button, p, td, th, h2, span, small, label, .body *")
    .filter((one) => one.children.length === 0 && one.textContent.trim())
    .filter((one) => {
      const [light, dark] = [getComputedStyle(one).color, ground(one)].map(luminance).sort((a, b) => b - a);
      return (light + 0.05) / (dark + 0.05) < 4.5;
    })
    .map((one) => `${one.outerHTML.slice(0, 120)} ${getComputedStyle(one).color} on ${ground(one)}`);
}

// Pastes or drops a file. Returns false if the page prevented the browser's default action.
function bring(way, base64) {
  const files = new DataTransfer();
  files.items.add(new File([Uint8Array.from(atob(base64), (letter) => letter.charCodeAt())], "it.png", { type: "image/png" }));
  const event = way === "paste"
    ? new ClipboardEvent("paste", { clipboardData: files, bubbles: true, cancelable: true })
    : new DragEvent("drop", { dataTransfer: files, bubbles: true, cancelable: true });
  return document.getElementById("input").dispatchEvent(event);
}

// Returns the text of the last answer in the browser's storage.
function keptText() {
  return new Promise((resolve) => {
    const request = indexedDB.open("tokamak", 1);
    request.onsuccess = () => {
      const all = request.result.transaction("conversations").objectStore("conversations").getAll();
      all.onsuccess = () => {
        request.result.close();
        resolve(all.result.flatMap((tree) => Object.values(tree.nodes)).filter(({ role }) => role === "assistant").at(-1)?.content ?? "");
      };
    };
  });
}
