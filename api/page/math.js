// Formulas: the tokens that marked recognizes, rendered by KaTeX, which makes elements and parses no markup.

import "./vendor/katex/katex.js"; // sets globalThis.katex
import { make } from "./dom.js";

const MAX_CHARACTERS = 10_000;
const OPTIONS = { throwOnError: true, trust: false, strict: "ignore", maxSize: 20, maxExpand: 500 };
const INLINE = [
  [/^\$\$([^$]+?)\$\$/, true],
  [/^\\\[([\s\S]+?)\\\]/, true],
  [/^\\\(([\s\S]+?)\\\)/, false],
  [/^\$(?!\s)((?:\\.|[^\\$\n])+?)(?<!\s)\$(?!\d)/, false], // not two prices
];
const BLOCK = /^ {0,3}(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])[ \t]*(?:\n|$)/;

const escaped = (text) => text.replace(/[&<>"]/g, (letter) => `&#${letter.charCodeAt(0)};`);
const code = ({ text, isBlock }) => `<code class="language-math-${isBlock ? "block" : "inline"}">${escaped(text)}</code>`;

export const extensions = [
  {
    name: "mathBlock", level: "block",
    start: (source) => /^ {0,3}(\$\$|\\\[)/m.exec(source)?.index,
    tokenizer(source) {
      const found = BLOCK.exec(source);
      return found ? { type: "mathBlock", raw: found[0], text: found[1] ?? found[2], isBlock: true } : undefined;
    },
    renderer: (token) => `<p>${code(token)}</p>`,
  },
  {
    name: "mathInline", level: "inline",
    start: (source) => /\$|\\[([]/.exec(source)?.index,
    tokenizer(source) {
      for (const [pattern, isBlock] of INLINE) {
        const found = pattern.exec(source);
        if (found) return { type: "mathInline", raw: found[0], text: found[1], isBlock };
      }
      return undefined;
    },
    renderer: code,
  },
];

// Replaces the source of a formula by the formula. Returns false if it is not one. Text that KaTeX cannot parse stays as it is.
export function shownMath(source, language) {
  const kind = /^math(?:-(block|inline))?$/.exec(language);
  if (!kind) return false;
  const text = source.textContent;
  const isBlock = kind[1] !== "inline";
  const formula = make(isBlock ? "div.formula" : "span.formula");
  try {
    if (text.length > MAX_CHARACTERS) throw new RangeError("too long");
    globalThis.katex.render(text, formula, { ...OPTIONS, displayMode: isBlock });
    (source.closest("pre") ?? source).replaceWith(formula);
  } catch {
    source.title = "KaTeX cannot render this formula";
  }
  return true;
}
