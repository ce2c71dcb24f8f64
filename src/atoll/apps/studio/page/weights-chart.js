// Routing weights over time: a stacked area chart with noise (t = 1) on the left and the image (t = 0) on the right.

import { element, svgElement } from "./dom.js";
import { percent } from "./format.js";

const VISIBLE_WEIGHT = 0.005; // texts leave out weights below half a percent

/** Return a chart that grows with the steps. The legend is called with the expert under the pointer, and with a clicked one. */
export function weightsChart(experts, legend = null) {
  const bands = experts.map(({ number, color }) => svgElement("path", { fill: color, "data-expert": number }));
  const cursor = svgElement("line", { class: "cursor", x1: -1, x2: -1, y1: 0, y2: 1 });
  const node = svgElement(
    "svg",
    {
      class: "weights-chart",
      role: "img",
      "aria-label": describe([], experts),
      preserveAspectRatio: "none",
      pointerover: ({ target }) => legend?.highlight(expertOf(target)),
      pointerleave: () => legend?.highlight(null),
      click: ({ target }) => expertOf(target) !== null && legend?.toggle(expertOf(target)),
    },
    bands,
    cursor,
  );
  return {
    node,
    draw(decisions, steps) {
      node.setAttribute("viewBox", `0 0 ${steps} 1`);
      node.setAttribute("aria-label", describe(decisions, experts));
      const edges = stackedEdges(decisions);
      bands.forEach((band, position) => band.setAttribute("d", bandPath(edges, position)));
    },
    setCursor(step) {
      cursor.setAttribute("x1", step);
      cursor.setAttribute("x2", step);
    },
    highlight(expert) {
      const other = (number) => expert !== null && number !== expert;
      experts.forEach(({ number }, position) => bands[position].classList.toggle("dim", other(number)));
    },
  };
}

function expertOf({ dataset }) {
  return dataset.expert === undefined ? null : Number(dataset.expert);
}

/** Return the edges of the experts' bands for every step. SVG's y axis points down: the bottom is y = 1. */
function stackedEdges(decisions) {
  return decisions.map(({ weights }) => {
    let height = 1;
    return [1, ...weights.map((weight) => (height -= weight))];
  });
}

/** Return the path of one band: along its upper edge and back along its lower edge. A step has the width 1. */
function bandPath(edges, position) {
  const upper = edges.map((heights, step) => `${step} ${heights[position + 1]} ${step + 1} ${heights[position + 1]}`);
  const lower = edges.map((heights, step) => `${step + 1} ${heights[position]} ${step} ${heights[position]}`);
  return edges.length ? `M${upper.join(" ")} ${lower.reverse().join(" ")}Z` : "";
}

/** Return the chart as a sentence for screen readers. */
function describe(decisions, experts) {
  if (!decisions.length) return "Routing weights over time: no steps yet";
  const mean = (position) => decisions.reduce((sum, { weights }) => sum + weights[position], 0) / decisions.length;
  const all = experts.map(({ number }, position) => ({ number, weight: mean(position) }));
  const visible = all.filter(({ weight }) => weight >= VISIBLE_WEIGHT).sort((one, other) => other.weight - one.weight);
  const list = visible.map(({ number, weight }) => `expert ${number} ${percent(weight)}`).join(", ");
  return `Mean routing weights over ${decisions.length} steps: ${list}`;
}

/** Return the decision at a step as text: the step, the time t and the weights, the largest first. */
export function describeStep(decision, { step, steps, experts }) {
  const position = `Step ${step} of ${steps}, t = ${decision.t.toFixed(2)}`;
  if (!experts) return position;
  const all = decision.weights.map((weight, index) => ({ weight, number: experts[index].number }));
  const visible = all.filter(({ weight }) => weight >= VISIBLE_WEIGHT).sort((one, other) => other.weight - one.weight);
  return `${position} · ${visible.map(({ weight, number }) => `expert\u00a0${number}:\u00a0${percent(weight)}`).join(", ")}`;
}

/** Return the weights as a table, which is built when it is opened: it may have thousands of cells. */
export function weightsTable(experts, decisions) {
  const table = element("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table of routing weights" });
  const head = ["step", "t", ...experts.map(({ number }) => `expert ${number}`)];
  const row = ({ t, weights }, step) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, String(step + 1)),
      element("td", {}, t.toFixed(2)),
      weights.map((weight) => element("td", {}, weight ? percent(weight) : "–")),
    );
  const build = ({ target }) =>
    target.open &&
    table.replaceChildren(
      element(
        "table",
        {},
        element("thead", {}, element("tr", {}, head.map((name) => element("th", { scope: "col" }, name)))),
        element("tbody", {}, decisions.map(row)),
      ),
    );
  return element("details", { class: "weights", toggle: build }, element("summary", {}, "Show as a table"), table);
}
