// Elements from plain values. Text becomes text nodes: nothing that the server says is read as markup.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. A function among the attributes listens to the event of its name; true and false are switches. */
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function drawn(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

let labels = 0;

/** A name that no other element has, for labels and descriptions. */
export function unique(prefix) {
  labels += 1;
  return `${prefix}-${labels}`;
}

/** Say something to screen readers. */
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}

/** A square of an expert's colour. */
export function swatch(colour) {
  const node = element("span", { class: "swatch", "aria-hidden": "true" });
  node.style.background = colour;
  return node;
}
