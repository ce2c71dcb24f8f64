// The mark of the studio: the run's experts as islands around a lagoon. While they paint, the busier are larger.

import { drawn } from "./dom.js";

const CENTRE = 20;
const RING = 14;

/** Draw the experts' islands into an empty mark; `pulse` sizes them by their shares, or makes them equal. */
export function mark(node, experts) {
  const even = Math.min(5, (0.8 * Math.PI * RING) / Math.max(experts.length, 3));
  const islands = experts.map(({ colour }, position) => {
    const angle = (2 * Math.PI * position) / experts.length - Math.PI / 2;
    const [cx, cy] = [CENTRE + RING * Math.cos(angle), CENTRE + RING * Math.sin(angle)];
    return drawn("circle", { cx, cy, r: even, fill: colour });
  });
  node.replaceChildren(...islands);
  return {
    pulse(shares) {
      islands.forEach((island, position) => {
        island.setAttribute("r", shares ? 1.2 + 1.3 * even * Math.sqrt(shares[position] ?? 0) : even);
      });
    },
  };
}
