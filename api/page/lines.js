// Small line charts of the last minutes.

import { make } from "./dom.js";

const WIDTH = 240;
const HEIGHT = 48;
const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// `values` in order of time, null where unknown. The axes show the greatest value, formatted by `written`, and the time span.
export function line(values, label, written, spanMs) {
  const known = values.filter((value) => value !== null);
  const top = Math.max(...known) || 1;  // the axis needs a height if all values are 0
  const points = values.map((value, index) => (value === null ? null
    : `${((index / Math.max(values.length - 1, 1)) * WIDTH).toFixed(1)},${(HEIGHT - 2 - (value / top) * (HEIGHT - 4)).toFixed(1)}`));
  const greatest = known.length ? written(top) : "–";
  const chart = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "line", role: "img", "aria-label": `${label}, last ${ago(spanMs)}, maximum ${greatest}`, preserveAspectRatio: "none" });
  for (const y of [2, HEIGHT - 2]) chart.append(element("line", { x1: 0, x2: WIDTH, y1: y, y2: y }));
  let piece = [];
  for (const point of [...points, null]) {
    if (point !== null) piece.push(point);
    else {
      if (piece.length > 1) chart.append(element("polyline", { points: piece.join(" ") }));
      piece = [];
    }
  }
  return make("div.axes", {},
    make("div.scale", {}, make("small", {}, greatest), make("small", {}, "0")), chart,
    make("div.times", {}, make("small", {}, spanMs ? `${ago(spanMs)} ago` : ""), make("small", {}, "now")));
}

function ago(spanMs) {
  const seconds = Math.round(spanMs / 1000);
  return seconds < 60 ? `${seconds} s` : `${Math.floor(seconds / 60)} min${seconds % 60 ? ` ${seconds % 60} s` : ""}`;
}
