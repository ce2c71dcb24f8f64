// Paint: a prompt and settings on one side, the picture that emerges and who paints it on the other.

import { announce, drawn, element } from "./dom.js";
import { Easel } from "./easel.js";
import { Legend } from "./experts.js";
import { hashOf } from "./link.js";
import { mark } from "./mark.js";
import { Painting } from "./painting.js";
import { RequestForm } from "./request.js";
import { plural, recipe, subject } from "./words.js";

const WIDE = window.matchMedia("(min-width: 901px)"); // the form stands beside the stage
const LOOKING = 2000; // milliseconds between two looks for a finished expert, while there is none

export class PaintView {
  constructor(studio) {
    this.studio = studio;
    this.title = element("h1", { id: "paint-title", class: "unseen", tabindex: -1 }, "Paint");
    this.stage = element("div", { class: "stage" });
    this.node = element("section", { class: "view paint", "aria-labelledby": "paint-title" });
    this.build();
  }

  /** The form and the stage, or what is missing for them. */
  build() {
    const { run } = this.studio;
    if (!run.models.length) return this.node.replaceChildren(this.title, nothingYet(run));
    this.form = new RequestForm(run, () => this.paint(), WIDE.matches);
    if (!this.painting) this.stage.replaceChildren(welcome(run));
    return this.node.replaceChildren(this.title, this.form.node, this.stage);
  }

  /** The view is shown. A link with settings paints them, unless they are on the stage already. */
  open(settings) {
    this.close();
    this.wanted = settings;
    const given = Object.keys(settings).length > 0;
    const address = this.painting ? hashOf("paint", this.painting.settings) : null;
    if (!this.form) this.timer = setInterval(() => this.studio.reload(), LOOKING);
    else if (address && !given) history.replaceState(null, "", address);
    else if (given && location.hash !== address) {
      this.form.write(settings);
      this.paint();
    }
  }

  close() {
    clearInterval(this.timer);
  }

  /** The run has changed, for instance because an expert was finished: what is in the form stays. */
  refresh() {
    clearInterval(this.timer);
    const [first, kept, focused] = [!this.form, this.form?.values(), document.activeElement?.name];
    this.build();
    if (kept) this.form.write(kept);
    if (focused) this.form?.node.elements.namedItem(focused)?.focus();
    if (first && this.node.isConnected) this.open(this.wanted);
  }

  async paint() {
    const settings = this.form.read();
    if (!settings) return;
    this.painting?.cancel();
    const painting = new Painting(settings, this.studio);
    this.painting = painting;
    history.replaceState(null, "", hashOf("paint", settings));
    const show = () => this.painting === painting && this.stage.replaceChildren(...this.scene(painting));
    painting.addEventListener("experts", show);
    show();
    if (!WIDE.matches) this.stage.scrollIntoView();
    await painting.run();
    if (painting.state === "failed") this.form.complain(painting.field, painting.saying);
    if (painting.state === "done") this.studio.gallery.add(settings, painting.pictures.map(({ made }) => made));
  }

  /** What stands on the stage while a painting is made and after. */
  scene(painting) {
    const { settings, routed, experts } = painting;
    const { size } = this.studio.run;
    const legend = routed && experts.length > 1 ? new Legend(painting, this.studio.topics) : null;
    const easels = painting.pictures.map((_, index) => new Easel(painting, index, { size, legend }));
    if (legend) legend.easels = easels;
    return [
      element("h2", {}, subject(settings)),
      element("p", { class: "recipe" }, recipe(settings)),
      this.going(painting),
      element(
        "div",
        { class: "scene", "data-many": Math.min(settings.n, 5) },
        element("div", { class: "easels" }, easels.map(({ node }) => node)),
        legend?.node,
      ),
    ];
  }

  /** Progress, a way to stop, and what to do next. */
  going(painting) {
    const { prompt, label, steps, guidance, seed } = painting.settings;
    const bar = element("progress", { max: steps, value: 0, "aria-label": "Steps painted" });
    const said = element("p", { class: "said" });
    const cancel = element("button", { type: "button", click: () => painting.cancel() }, "Cancel");
    const others = hashOf("compare", { prompt, label, steps, guidance, seed });
    const compare = element("a", { class: "button", href: others }, "Compare painters");
    const node = element("div", { class: "going" }, bar, said, cancel, compare);
    const follow = () => {
      bar.value = painting.step;
      said.textContent = painting.saying;
      node.dataset.state = painting.state;
      [bar.hidden, cancel.hidden, compare.hidden] = [painting.over, painting.over, painting.state !== "done"];
      tell(painting);
      this.studio.mark.pulse(painting.over ? null : painting.sharesNow());
    };
    painting.addEventListener("change", follow);
    follow();
    return node;
  }
}

/** Screen readers hear of the quarters, not of every step. */
function tell(painting) {
  const quarter = Math.floor((4 * painting.step) / painting.settings.steps);
  const news = painting.state === "painting" ? `${25 * quarter} percent painted` : painting.saying;
  if (news !== painting.told) announce(news);
  painting.told = news;
}

/** The run's islands around what every picture starts from. */
function lagoon(run) {
  const ring = drawn("svg", { viewBox: "0 0 40 40" });
  mark(ring, run);
  return element("div", { class: "lagoon", "aria-hidden": "true" }, element("div", {}), ring);
}

function welcome(run) {
  const { experts, examples, conditions } = run;
  const apart = `${plural(experts.length, "expert")} learned apart, each from its own cluster of pictures. `;
  return element(
    "div",
    { class: "welcome" },
    lagoon(run),
    element("p", { class: "lead" }, `${experts.length > 1 ? apart : ""}Ask for a picture and watch who paints it.`),
    conditions.text && examples.length > 0 && element("p", {}, "Take an example, or type your own and press Enter."),
  );
}

function nothingYet(run) {
  const { missing } = run;
  const why = missing.length ? "Nothing can paint yet: no expert is finished." : "The models are being opened.";
  const islands = element("a", { href: "#islands" }, "Watch the training on the islands");
  return element(
    "div",
    { class: "welcome" },
    lagoon(run),
    element("p", { class: "lead" }, why),
    missing.length > 0 && element("p", {}, `Missing: ${missing.join(", ")}.`),
    element("p", {}, "This page looks again by itself. ", islands),
  );
}
