// Rendering of model output. The text is untrusted: only a short list of tags is allowed, without attributes that load, run or style
// anything.

import { marked } from "./vendor/marked.js";
import hljs from "./vendor/highlight.js";
import DOMPurify from "./vendor/purify.js";
import { button, make } from "./dom.js";
import { extensions, shownMath } from "./math.js";

const MAX_RENDERED_CHARACTERS = 200_000;
const RULES = {
  ALLOWED_TAGS: ["a", "b", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "li", "ol", "p",
    "pre", "s", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["href", "start", "align", "class"],
  ALLOWED_URI_REGEXP: /^(https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const MAX_COLORED_CHARACTERS = 20_000;
const COLORS = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false, RETURN_DOM_FRAGMENT: true };

marked.use({ extensions });

// Keeps only the classes of highlighted code: others would let text look like a part of the page.
const CLASSES = { CODE: /^language-[\w+#.-]{1,30}$/, SPAN: /^(hljs-\w+|language-\w+|\w+_| )+$/ };
DOMPurify.addHook("uponSanitizeAttribute", (element, data) => {
  if (data.attrName === "class") data.keepAttr = CLASSES[element.tagName]?.test(data.attrValue) ?? false;
});

export function rendered(text) {
  if (text.length > MAX_RENDERED_CHARACTERS) return make("div.plain-text", {}, text);
  let html;
  try {
    html = marked.parse(text, { gfm: true, breaks: true, async: false });
  } catch {
    return make("div.plain-text", {}, text);
  }
  const shown = make("div.markdown", {}, DOMPurify.sanitize(html, RULES));
  for (const link of shown.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const code of shown.querySelectorAll("code[class]")) {
    const language = code.className.slice("language-".length);
    if (!shownMath(code, language)) color(code, language);
  }
  for (const code of shown.querySelectorAll("pre")) {
    const copy = button("Copy", "Copy code", async () => {
      await copied(code.querySelector("code")?.textContent ?? code.textContent);
      copy.textContent = "Copied";
      setTimeout(() => { copy.textContent = "Copy"; }, 1500);
    });
    const box = make("div.code");
    code.replaceWith(box);
    box.append(code, copy);
  }
  return shown;
}

// Highlights code of a known language. The library escapes the text, and only its spans are kept.
function color(code, language) {
  const text = code.textContent;
  if (!hljs.getLanguage(language) || text.length > MAX_COLORED_CHARACTERS) return;
  code.replaceChildren(DOMPurify.sanitize(hljs.highlight(text, { language, ignoreIllegals: true }).value, COLORS));
}

export async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = make("textarea.offscreen", { value: text });  // navigator.clipboard needs TLS or localhost
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}
