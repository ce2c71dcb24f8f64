// The experts of a generation with their mean routing weights. Pointing at one shows what it generates alone.

import { element, swatch } from "./dom.js";
import { percent } from "./format.js";
import { Generation } from "./generation.js";

// Milliseconds that the pointer must rest on an expert before its image is generated. Moving across the legend then
// sends no requests.
const HOVER_DELAY = 250;

/** The legend of a generation; `views` are its image views. */
export class ExpertLegend {
  constructor(generation, topics) {
    const { experts } = generation;
    // `singles` are the generations with one expert, by its number; they are run once and kept.
    Object.assign(this, { generation, experts, views: [], singles: new Map(), pinned: null, shown: null });
    this.cards = experts.map((expert) => this.card(expert, topics.get(expert.number)));
    this.hint = element("p", { class: "hint" });
    this.all = element("button", { type: "button", hidden: true, click: () => this.generateAll() }, "Run each expert");
    this.node = element(
      "section",
      { class: "legend", "aria-label": "Experts" },
      element("div", { class: "headline" }, element("h3", {}, "Experts"), this.all),
      this.hint,
      element("ul", { class: "experts" }, this.cards.map(({ node }) => element("li", {}, node))),
    );
    generation.addEventListener("change", () => this.update());
    this.update();
  }

  card({ number, color }, topic) {
    const thumbnail = element("img", { alt: "", hidden: true });
    const weight = element("b", {});
    const node = element(
      "button",
      {
        type: "button", class: "expert", "aria-pressed": "false",
        pointerenter: () => this.highlight(number), pointerleave: () => this.highlight(null),
        focus: () => this.highlight(number), blur: () => this.highlight(null), click: () => this.toggle(number),
      },
      element("span", { class: "thumbnail" }, swatch(color), thumbnail),
      element("span", { class: "name" }, `Expert ${number}`, topic ? element("small", {}, topic) : null),
      weight,
    );
    node.style.setProperty("--expert", color);
    return { node, thumbnail, weight };
  }

  /** Show the mean weights so far. */
  update() {
    const { state } = this.generation;
    const weights = this.generation.meanWeights();
    this.cards.forEach(({ node, weight }, position) => {
      node.style.setProperty("--share", weights?.[position] ?? 0);
      weight.textContent = weights ? percent(weights[position]) : "";
    });
    this.all.hidden = state !== "done";
    this.hint.textContent = state === "done"
      ? "Mean routing weights. Point at an expert to see its image from the same noise; click to keep it shown."
      : "Mean routing weights so far.";
  }

  /** The pointer or the focus is on an expert, or on none (null). */
  highlight(number) {
    this.show(number ?? this.pinned);
  }

  toggle(number) {
    this.pinned = this.pinned === number ? null : number;
    this.cards.forEach(({ node }, position) => {
      node.setAttribute("aria-pressed", String(this.experts[position].number === this.pinned));
    });
    this.show(this.pinned);
  }

  show(number) {
    clearTimeout(this.timer);
    this.shown = number;
    this.views.forEach((view) => view.highlight(number));
    if (this.generation.state !== "done") return;
    if (number !== null && !this.singles.has(number)) {
      this.timer = setTimeout(() => this.generateSingle(number), HOVER_DELAY);
    }
    this.showSingle();
  }

  /** Generate with one expert from the same noise; resolves when the request ends. */
  generateSingle(number) {
    const settings = { ...this.generation.settings, routing: undefined, expert: number };
    const generation = new Generation(settings, this.generation.studio);
    const { thumbnail } = this.cards[this.experts.findIndex((expert) => expert.number === number)];
    this.singles.set(number, generation);
    generation.addEventListener("change", () => {
      const source = generation.frame(0, generation.settings.steps);
      if (source) Object.assign(thumbnail, { src: source, hidden: false });
      if (generation.state === "failed") this.singles.delete(number); // the next hover tries again
      if (this.shown === number) this.showSingle(generation);
    });
    this.showSingle();
    return generation.run();
  }

  /** Generate with every expert in turn. One at a time leaves the server free for others. */
  async generateAll() {
    this.all.disabled = true;
    for (const { number } of this.experts) if (!this.singles.has(number)) await this.generateSingle(number);
  }

  showSingle(generation = this.singles.get(this.shown)) {
    const expert = this.experts.find(({ number }) => number === this.shown);
    const single = generation && expert ? { ...expert, generation } : null;
    this.views.forEach((view) => view.showSingle(single));
  }
}
