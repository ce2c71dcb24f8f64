// The logo: one circle for each expert of the run, in a ring. Experts that are not trained yet are dashed outlines.

import { svgElement } from "./dom.js";

// Coordinates in the view box of 40 x 40.
const CENTER = 20;
const RING = 14;

/** Draw the logo of a run into an SVG node; `resize` scales the circles by routing weights, or makes them equal. */
export function drawLogo(node, { experts, missing }) {
  const count = experts.length + missing.length;
  const radius = Math.min(5, (0.8 * Math.PI * RING) / Math.max(count, 3)); // neighbors never touch
  const circle = (position) => {
    const angle = (2 * Math.PI * position) / count - Math.PI / 2;
    return { cx: CENTER + RING * Math.cos(angle), cy: CENTER + RING * Math.sin(angle), r: radius };
  };
  const trained = experts.map(({ color }, position) => svgElement("circle", { ...circle(position), fill: color }));
  const outline = (position) => svgElement("circle", { ...circle(experts.length + position), class: "missing" });
  const outlines = missing.map((_, position) => outline(position));
  node.replaceChildren(...trained, ...outlines);
  return {
    resize(weights) {
      trained.forEach((node, position) => {
        // The square root makes the area, not the radius, proportional to the weight. 1.2 keeps unused experts visible.
        node.setAttribute("r", weights ? 1.2 + 1.3 * radius * Math.sqrt(weights[position] ?? 0) : radius);
      });
    },
  };
}
