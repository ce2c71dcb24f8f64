// Who paints: the experts as a legend with their shares; pointing at one shows what it alone makes of the same noise.

import { element, swatch } from "./dom.js";
import { Painting } from "./painting.js";
import { percent } from "./words.js";

const PATIENCE = 250; // milliseconds on an expert before it is asked to paint: passing over is no question

/** The legend of a painting whose pictures stand on `easels`. */
export class Legend {
  constructor(painting, topics) {
    const { experts } = painting;
    Object.assign(this, { painting, experts, easels: [], alone: new Map(), pinned: null, shown: null });
    this.cards = experts.map((expert) => this.card(expert, topics.get(expert.number)));
    this.hint = element("p", { class: "hint" });
    this.every = element("button", { type: "button", hidden: true, click: () => this.askAll() }, "Ask every expert");
    this.node = element(
      "section",
      { class: "legend", "aria-label": "Who paints" },
      element("div", { class: "headline" }, element("h3", {}, "Who paints"), this.every),
      this.hint,
      element("ul", { class: "experts" }, this.cards.map(({ node }) => element("li", {}, node))),
    );
    painting.addEventListener("change", () => this.follow());
    this.follow();
  }

  card({ number, colour }, topic) {
    const thumb = element("img", { alt: "", hidden: true });
    const share = element("b", {});
    const node = element(
      "button",
      {
        type: "button", class: "expert", "aria-pressed": "false",
        pointerenter: () => this.point(number), pointerleave: () => this.point(null),
        focus: () => this.point(number), blur: () => this.point(null), click: () => this.pin(number),
      },
      element("span", { class: "thumb" }, swatch(colour), thumb),
      element("span", { class: "name" }, `Expert ${number}`, topic ? element("small", {}, topic) : null),
      share,
    );
    node.style.setProperty("--expert", colour);
    return { node, thumb, share };
  }

  /** The painting has changed: show the shares so far. */
  follow() {
    const { state } = this.painting;
    const shares = this.painting.shares();
    this.cards.forEach(({ node, share }, position) => {
      node.style.setProperty("--share", shares?.[position] ?? 0);
      share.textContent = shares ? percent(shares[position]) : "";
    });
    this.every.hidden = state !== "done";
    this.hint.textContent = state === "done"
      ? "Point at an expert, here or in a ribbon, to see what it alone makes of the same noise. Click to keep it shown."
      : "Shares of the steps so far.";
  }

  /** The pointer or the focus is on an expert, or on none. */
  point(number) {
    this.show(number ?? this.pinned);
  }

  pin(number) {
    this.pinned = this.pinned === number ? null : number;
    this.cards.forEach(({ node }, position) => {
      node.setAttribute("aria-pressed", String(this.experts[position].number === this.pinned));
    });
    this.show(this.pinned);
  }

  show(number) {
    clearTimeout(this.timer);
    this.shown = number;
    this.easels.forEach((easel) => easel.light(number));
    if (this.painting.state !== "done") return;
    if (number !== null && !this.alone.has(number)) {
      this.timer = setTimeout(() => this.ask(number), PATIENCE);
    }
    this.present();
  }

  /** Let an expert paint alone, once; resolves when it is over. */
  ask(number) {
    const painting = new Painting({ ...this.painting.settings, routing: undefined, expert: number }, this.painting.studio);
    const { thumb } = this.cards[this.experts.findIndex((expert) => expert.number === number)];
    this.alone.set(number, painting);
    painting.addEventListener("change", () => {
      const source = painting.frame(0, painting.settings.steps);
      if (source) Object.assign(thumb, { src: source, hidden: false });
      if (painting.state === "failed") this.alone.delete(number);
      if (this.shown === number) this.present(painting);
    });
    this.present();
    return painting.run();
  }

  /** All of them, one after the other. */
  async askAll() {
    this.every.disabled = true;
    for (const { number } of this.experts) if (!this.alone.has(number)) await this.ask(number);
  }

  present(painting = this.alone.get(this.shown)) {
    const expert = this.experts.find(({ number }) => number === this.shown);
    const alone = painting && expert ? { ...expert, painting } : null;
    this.easels.forEach((easel) => easel.showAlone(alone));
  }
}
