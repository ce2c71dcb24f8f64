// Who paints when: the experts' weights from noise on the left to the picture on the right, as a stacked ribbon.

import { drawn, element } from "./dom.js";
import { percent } from "./words.js";

/** A ribbon that grows with the steps. A legend is told which expert is under the pointer, and which is clicked. */
export function ribbon(experts, legend = null) {
  const bands = experts.map(({ number, colour }) => drawn("path", { fill: colour, "data-expert": number }));
  const cursor = drawn("line", { class: "cursor", x1: -1, x2: -1, y1: 0, y2: 1 });
  const node = drawn(
    "svg",
    {
      class: "ribbon",
      role: "img",
      "aria-label": spoken([], experts),
      preserveAspectRatio: "none",
      pointerover: ({ target }) => legend?.point(expertOf(target)),
      pointerleave: () => legend?.point(null),
      click: ({ target }) => expertOf(target) !== null && legend?.pin(expertOf(target)),
    },
    bands,
    cursor,
  );
  return {
    node,
    draw(decisions, steps) {
      node.setAttribute("viewBox", `0 0 ${steps} 1`);
      node.setAttribute("aria-label", spoken(decisions, experts));
      const edges = stacked(decisions);
      bands.forEach((band, position) => band.setAttribute("d", outline(edges, position)));
    },
    mark(step) {
      cursor.setAttribute("x1", step);
      cursor.setAttribute("x2", step);
    },
    light(expert) {
      const other = (number) => expert !== null && number !== expert;
      experts.forEach(({ number }, position) => bands[position].classList.toggle("dim", other(number)));
    },
  };
}

function expertOf({ dataset }) {
  return dataset.expert === undefined ? null : Number(dataset.expert);
}

/** For every step the heights at which the experts' bands begin and end, from the bottom: y = 1. */
function stacked(decisions) {
  return decisions.map(({ weights }) => {
    let height = 1;
    return [1, ...weights.map((weight) => (height -= weight))];
  });
}

/** The outline of one band: its upper edge there, its lower edge back. A step is as wide as 1. */
function outline(edges, position) {
  const upper = edges.map((heights, step) => `${step} ${heights[position + 1]} ${step + 1} ${heights[position + 1]}`);
  const lower = edges.map((heights, step) => `${step + 1} ${heights[position]} ${step} ${heights[position]}`);
  return edges.length ? `M${upper.join(" ")} ${lower.reverse().join(" ")}Z` : "";
}

/** The ribbon in a sentence. */
function spoken(decisions, experts) {
  if (!decisions.length) return "Weights of the experts over the steps: none yet";
  const mean = (position) => decisions.reduce((sum, { weights }) => sum + weights[position], 0) / decisions.length;
  const parts = experts.map(({ number }, position) => ({ number, share: mean(position) }));
  const said = parts.filter(({ share }) => share >= 0.005).sort((one, other) => other.share - one.share);
  const list = said.map(({ number, share }) => `expert ${number} ${percent(share)}`).join(", ");
  return `Weights of the experts over ${decisions.length} steps: ${list}`;
}

/** The same as a table, made when it is opened. */
export function weightsTable(experts, decisions) {
  const table = element("div", { class: "wide", tabindex: 0, role: "group", "aria-label": "Weights as a table" });
  const head = ["step", "t", ...experts.map(({ number }) => `expert ${number}`)];
  const row = ({ t, weights }, step) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, String(step + 1)),
      element("td", {}, t.toFixed(2)),
      weights.map((weight) => element("td", {}, weight ? percent(weight) : "–")),
    );
  const opened = ({ target }) =>
    target.open &&
    table.replaceChildren(
      element(
        "table",
        {},
        element("thead", {}, element("tr", {}, head.map((name) => element("th", { scope: "col" }, name)))),
        element("tbody", {}, decisions.map(row)),
      ),
    );
  return element("details", { class: "weights", toggle: opened }, element("summary", {}, "Weights as a table"), table);
}
