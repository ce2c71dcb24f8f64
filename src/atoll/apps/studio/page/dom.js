// Build DOM elements from plain values. Children become text nodes, so text of the server is never parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Return an HTML element. Function attributes are event listeners; true and false set and omit an attribute. */
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Return an SVG element. */
export function svgElement(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  // Empty children let callers write `condition && element(…)`.
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

let ids = 0;

/** Return an id that no other element has; labels and descriptions refer to it. */
export function uniqueId(prefix) {
  ids += 1;
  return `${prefix}-${ids}`;
}

/** Announce a text to screen readers. */
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}

/** Return a square in an expert's color. */
export function swatch(color) {
  const node = element("span", { class: "swatch", "aria-hidden": "true" });
  node.style.background = color;
  return node;
}
