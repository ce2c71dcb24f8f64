// The mark of the studio: the run's experts as islands around a lagoon. While they paint, the busier are larger; those
// that are not finished are outlines.

import { drawn } from "./dom.js";

const CENTRE = 20;
const RING = 14;

/** Draw the islands of a run; `pulse` sizes them by their shares, or makes them equal. */
export function mark(node, { experts, missing }) {
  const many = experts.length + missing.length;
  const even = Math.min(5, (0.8 * Math.PI * RING) / Math.max(many, 3));
  const place = (position) => {
    const angle = (2 * Math.PI * position) / many - Math.PI / 2;
    return { cx: CENTRE + RING * Math.cos(angle), cy: CENTRE + RING * Math.sin(angle), r: even };
  };
  const islands = experts.map(({ colour }, position) => drawn("circle", { ...place(position), fill: colour }));
  const outline = (position) => drawn("circle", { ...place(experts.length + position), class: "missing" });
  const outlines = missing.map((_, position) => outline(position));
  node.replaceChildren(...islands, ...outlines);
  return {
    pulse(shares) {
      islands.forEach((island, position) => {
        island.setAttribute("r", shares ? 1.2 + 1.3 * even * Math.sqrt(shares[position] ?? 0) : even);
      });
    },
  };
}
