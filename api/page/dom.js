// Elements made without parsing HTML: text is never read as markup.

export const $ = (id) => document.getElementById(id);

// make("button.plain", { type: "button", onclick }, "Copy", child)
export function make(kind, properties = {}, ...children) {
  const [tag, ...classes] = kind.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

export const button = (text, title, onclick) =>
  make("button.plain", { type: "button", title, "aria-label": title, onclick }, text);

// Icon button: `name` is read by screen readers, `icon` is a class of style.css, `title` is shown on hover.
export function iconButton(icon, name, title, onclick) {
  const made = make(`button.icon.${icon}`, { type: "button", title: title || name, "aria-label": name, onclick });
  return made;
}

export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
