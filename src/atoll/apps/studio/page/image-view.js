// One generated image: its previews, its routing weights, and a slider over the steps.

import { element } from "./dom.js";
import { conditionText, fileName, modelName } from "./format.js";
import { copyLink, urlOf } from "./link.js";
import { describeStep, weightsChart, weightsTable } from "./weights-chart.js";

/** The figure of image `index` of a generation. With a legend, it shows the chart of the routing weights. */
export class ImageView {
  constructor(generation, index, { legend }) {
    Object.assign(this, { generation, index, single: null });
    const { settings, images, experts, size } = generation;
    this.routed = legend !== null;
    this.image = element("img", { class: "generated", alt: "", width: size[1], height: size[0] });
    this.tag = element("span", { class: "tag", hidden: true });
    this.frame = element("div", { class: "frame" }, this.image, this.tag);
    this.chart = weightsChart(experts, legend);
    this.slider = element("input", {
      type: "range", min: 0, max: settings.steps, value: 0, disabled: true, "aria-label": "Displayed step",
      input: () => this.draw(),
    });
    this.stepText = element("p", { class: "step-text" });
    this.actions = element("div", { class: "actions" });
    this.node = element(
      "figure",
      { class: "image-view" },
      this.frame,
      this.routed && element("h3", { class: "chart-title" }, "Routing weights over time"),
      this.routed && this.chart.node,
      element("div", { class: "timeline" }, element("span", {}, "noise"), this.slider, element("span", {}, "image")),
      this.stepText,
      this.actions,
      this.routed && weightsTable(experts, images[index].decisions),
    );
    this.frame.style.aspectRatio = `${size[1]} / ${size[0]}`;
    generation.addEventListener("change", () => this.update());
    this.update();
  }

  /** Show the newest step of the generation. */
  update() {
    const { decisions, final } = this.generation.images[this.index];
    this.slider.value = decisions.length;
    this.slider.disabled = !this.generation.ended || !decisions.length;
    if (this.routed) this.chart.draw(decisions, this.generation.settings.steps);
    if (final && !this.actions.childElementCount) this.addActions(final);
    this.draw();
  }

  /** Show the image at the slider's step, or the image of a single expert. */
  draw() {
    const { settings, ended } = this.generation;
    const shown = this.single?.generation ?? this.generation;
    const step = this.single ? settings.steps : Number(this.slider.value);
    const source = shown.frame(this.index, step);
    if (source) this.image.src = source;
    this.frame.classList.toggle("empty", !source);
    this.frame.classList.toggle("busy", !shown.ended);
    this.image.alt = `${conditionText(settings)}, generated with ${modelName(shown.settings)}`;
    this.chart.setCursor(ended && step < settings.steps ? step : -1);
    const text = this.describe(step);
    this.stepText.textContent = text;
    this.slider.setAttribute("aria-valuetext", text);
  }

  /** Return the routing decision at a step as text. */
  describe(step) {
    const { images, settings, experts } = this.generation;
    const decision = images[this.index].decisions[step - 1];
    if (!decision) return step ? "" : "Step 0: noise";
    return describeStep(decision, { step, steps: settings.steps, experts: this.routed ? experts : null });
  }

  /** Show what one expert generates from the same noise: {number, color, generation}; null shows the image itself. */
  showSingle(single) {
    this.single = single;
    this.frame.style.setProperty("--expert", single?.color ?? "transparent");
    this.frame.classList.toggle("single", single !== null);
    this.tag.hidden = single === null;
    if (single) this.tag.textContent = this.tagText(single);
    this.draw();
  }

  tagText({ number, generation }) {
    const progress = Math.round((100 * generation.step) / generation.settings.steps);
    if (generation.state === "failed") return `Expert ${number}: ${generation.status}`;
    return generation.ended ? `Expert ${number} only` : `Expert ${number} only … ${progress} %`;
  }

  highlight(expert) {
    this.chart.highlight(expert);
  }

  addActions(final) {
    const { settings } = this.generation;
    const file = `${fileName(settings)}-${this.index}.png`;
    this.actions.append(
      element("a", { class: "button", href: final, download: file }, "Download"),
      copyButton(urlOf("generate", settings)),
    );
  }
}

/** Return a button that copies a link and confirms it for a moment. */
export function copyButton(link) {
  const button = element("button", { type: "button" }, "Copy link");
  button.addEventListener("click", async () => {
    if (!(await copyLink(link))) return;
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy link"), 1500);
  });
  return button;
}
