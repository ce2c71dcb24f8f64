// One picture on its easel: it emerges, with the ribbon of its experts below; the slider goes back through the steps.

import { element } from "./dom.js";
import { copy, linkTo } from "./link.js";
import { ribbon, weightsTable } from "./ribbon.js";
import { fileName, painter, percent, subject } from "./words.js";

/** The figure of picture `index` of a painting. Its ribbon, if it has one, points at the experts of the legend. */
export class Easel {
  constructor(painting, index, { size, legend }) {
    Object.assign(this, { painting, index, alone: null });
    const { settings, pictures, experts } = painting;
    this.routed = legend !== null;
    this.picture = element("img", { class: "made", alt: "", width: size[1], height: size[0] });
    this.tag = element("span", { class: "tag", hidden: true });
    this.frame = element("div", { class: "frame" }, this.picture, this.tag);
    this.ribbon = ribbon(experts, legend);
    this.slider = element("input", {
      type: "range", min: 0, max: settings.steps, value: 0, disabled: true, "aria-label": "Step that is shown",
      input: () => this.draw(),
    });
    this.reading = element("p", { class: "reading" });
    this.actions = element("div", { class: "actions" });
    this.node = element(
      "figure",
      { class: "easel" },
      this.frame,
      this.routed && this.ribbon.node,
      element("div", { class: "time" }, element("span", {}, "noise"), this.slider, element("span", {}, "picture")),
      this.reading,
      this.actions,
      this.routed && weightsTable(experts, pictures[index].decisions),
    );
    this.frame.style.aspectRatio = `${size[1]} / ${size[0]}`;
    painting.addEventListener("change", () => this.follow());
    this.follow();
  }

  /** The painting has changed: show its newest step. */
  follow() {
    const { decisions, made } = this.painting.pictures[this.index];
    this.slider.value = decisions.length;
    this.slider.disabled = !this.painting.over || !decisions.length;
    if (this.routed) this.ribbon.draw(decisions, this.painting.settings.steps);
    if (made && !this.actions.childElementCount) this.offer(made);
    this.draw();
  }

  /** Show the step of the slider, or what the expert that is pointed at makes alone. */
  draw() {
    const { settings, over } = this.painting;
    const shown = this.alone?.painting ?? this.painting;
    const step = this.alone ? settings.steps : Number(this.slider.value);
    const source = shown.frame(this.index, step);
    if (source) this.picture.src = source;
    this.frame.classList.toggle("empty", !source);
    this.frame.classList.toggle("busy", !shown.over);
    this.picture.alt = `${subject(settings)}, painted by ${painter(shown.settings)}`;
    this.ribbon.mark(over && step < settings.steps ? step : -1);
    const said = this.read(step);
    this.reading.textContent = said;
    this.slider.setAttribute("aria-valuetext", said);
  }

  /** The decision at a step, in words. */
  read(step) {
    const { pictures, settings, experts } = this.painting;
    const decision = pictures[this.index].decisions[step - 1];
    if (!decision) return step ? "" : "nothing but noise";
    const place = `step ${step} of ${settings.steps}, t = ${decision.t.toFixed(2)}`;
    if (!this.routed) return place;
    const parts = decision.weights.map((weight, position) => ({ weight, number: experts[position].number }));
    const said = parts.filter(({ weight }) => weight >= 0.005).sort((one, other) => other.weight - one.weight);
    return `${place}: ${said.map(({ weight, number }) => `${percent(weight)}\u00a0expert\u00a0${number}`).join(", ")}`;
  }

  /** Show what an expert alone makes of the same noise: {number, colour, painting}, or null for the picture itself. */
  showAlone(alone) {
    this.alone = alone;
    this.frame.style.setProperty("--expert", alone?.colour ?? "transparent");
    this.frame.classList.toggle("alone", alone !== null);
    this.tag.hidden = alone === null;
    if (alone) this.tag.textContent = this.tagged(alone);
    this.draw();
  }

  tagged({ number, painting }) {
    const far = Math.round((100 * painting.step) / painting.settings.steps);
    if (painting.state === "failed") return `Expert ${number}: ${painting.saying}`;
    return painting.over ? `Expert ${number} alone` : `Expert ${number} alone … ${far} %`;
  }

  light(expert) {
    this.ribbon.light(expert);
  }

  offer(made) {
    const { settings } = this.painting;
    const file = `${fileName(settings)}-${this.index}.png`;
    this.actions.append(
      element("a", { class: "button", href: made, download: file }, "Download"),
      copyButton(linkTo("paint", settings)),
    );
  }
}

/** A button that copies a link and says so. */
export function copyButton(link) {
  const button = element("button", { type: "button" }, "Copy link");
  button.addEventListener("click", async () => {
    if (!(await copy(link))) return;
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy link"), 1500);
  });
  return button;
}
