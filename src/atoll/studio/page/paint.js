// Paint: a prompt and settings on one side, the picture that emerges and who paints it on the other.

import { announce, drawn, element } from "./dom.js";
import { Easel } from "./easel.js";
import { Legend } from "./experts.js";
import { choice, choose, clear, complain, examples, field, number, offer, subjectFields } from "./form.js";
import { hashOf } from "./link.js";
import { mark } from "./mark.js";
import { Painting } from "./painting.js";
import { plural, recipe, routing, subject } from "./words.js";

const SEEDS = 1_000_000;
const WIDE = window.matchMedia("(min-width: 901px)"); // the form stands beside the stage
const LOOKING = 2000; // milliseconds between two looks for a finished expert, while there is none

export class PaintView {
  constructor(studio) {
    this.studio = studio;
    this.painting = null;
    this.node = element("section", { class: "view paint", "aria-labelledby": "paint-title" });
    this.stage = element("div", { class: "stage" });
    this.build();
  }

  /** The form and the stage, or what is missing for them. */
  build() {
    const { run } = this.studio;
    const title = element("h1", { id: "paint-title", class: "unseen", tabindex: -1 }, "Paint");
    if (!run.models.length) return this.node.replaceChildren(title, nothingYet(run));
    this.form = this.fields(run);
    this.write({});
    if (!this.painting) this.stage.replaceChildren(welcome(run));
    return this.node.replaceChildren(title, this.form, this.stage);
  }

  fields(run) {
    const { limits } = run;
    this.subject = subjectFields(run);
    this.painter = choice("model", painters(run));
    this.routing = choice("routing", run.routings.map((name) => [name, name]));
    this.meaning = element("small", { class: "meaning" });
    this.steps = number("steps", { min: 1, max: limits.steps });
    this.guidance = number("guidance", { min: 0, max: limits.guidance, step: "any" });
    this.seed = number("seed", { min: 0 });
    this.many = number("n", { min: 1, max: limits.n });
    this.go = element("button", { class: "primary", type: "submit" }, "Paint");
    const dice = element("button", { type: "button", click: () => this.roll() }, "Paint with a new seed");
    const form = element(
      "form",
      { class: "settings", "aria-label": "What to paint", submit: (event) => this.submit(event), keydown: hurry },
      this.subject.nodes,
      examples(run.examples, (caption) => this.take(caption)),
      this.go,
      element(
        "details",
        { open: WIDE.matches },
        element("summary", {}, "Settings"),
        element("div", { class: "pair" }, this.who(run)),
        this.meaning,
        element("div", { class: "pair" }, field("Steps", this.steps), field("Guidance", this.guidance)),
        element("div", { class: "pair" }, field("Seed", this.seed), field("Pictures", this.many)),
        dice,
      ),
      run.missing.length > 0 && stillMissing(run),
    );
    form.addEventListener("change", () => this.explain());
    return form;
  }

  /** Fields for who paints, where there is a choice. */
  who(run) {
    const painter = painters(run).length > 1 ? field("Painter", this.painter) : null;
    const routed = run.experts.length > 1 ? field("Routing", this.routing) : null;
    return [painter, routed].filter(Boolean);
  }

  explain() {
    const routed = this.painter.value === "experts";
    this.routing.disabled = !routed;
    this.meaning.textContent = routed ? routing(this.routing.value) : "";
  }

  read() {
    const [model, expert] = this.painter.value.split("/");
    return {
      ...this.subject.read(),
      model,
      ...(expert === undefined ? {} : { expert: Number(expert) }),
      routing: this.painter.value === "experts" ? this.routing.value : undefined,
      steps: this.steps.valueAsNumber,
      guidance: this.guidance.valueAsNumber,
      seed: this.seed.valueAsNumber,
      n: this.many.valueAsNumber,
    };
  }

  /** Fill the form; what is not given is as the run proposes. */
  write(given) {
    const settings = { model: this.studio.run.models[0], seed: 0, ...this.studio.run.defaults, ...given };
    this.subject.write(settings);
    choose(this.painter, settings.expert === undefined ? settings.model : `experts/${settings.expert}`);
    if (settings.routing) choose(this.routing, settings.routing);
    this.steps.value = settings.steps;
    this.guidance.value = settings.guidance;
    this.seed.value = settings.seed;
    this.many.value = settings.n;
    this.explain();
  }

  /** The view is shown; a link with settings paints them. */
  open(settings) {
    const address = this.painting ? hashOf("paint", this.painting.settings) : null;
    if (!this.form) this.timer = setInterval(() => this.studio.reload(), LOOKING);
    else if (address && !Object.keys(settings).length) history.replaceState(null, "", address);
    else if (Object.keys(settings).length && location.hash !== address) {
      this.write(settings);
      this.paint();
    }
  }

  close() {
    clearInterval(this.timer);
  }

  /** The run has changed, for instance because an expert was finished. */
  refresh() {
    clearInterval(this.timer);
    if (!this.form) return this.build();
    offer(this.painter, painters(this.studio.run));
    offer(this.routing, this.studio.run.routings.map((name) => [name, name]));
    return this.explain();
  }

  roll() {
    this.seed.value = Math.floor(SEEDS * Math.random());
    this.paint();
  }

  take(caption) {
    this.subject.write({ prompt: caption });
    this.paint();
  }

  submit(event) {
    event.preventDefault();
    this.paint();
  }

  async paint() {
    if (!this.form.reportValidity()) return;
    clear(this.form);
    this.painting?.cancel();
    const settings = this.read();
    const painting = new Painting(settings);
    this.painting = painting;
    history.replaceState(null, "", hashOf("paint", settings));
    this.stage.replaceChildren(...this.scene(painting));
    if (!WIDE.matches) this.stage.scrollIntoView();
    await painting.run();
    if (painting.state === "failed") complain(this.form, painting.field, painting.saying);
    if (painting.state === "done") this.studio.gallery.add(settings, painting.pictures.map(({ made }) => made));
  }

  /** What stands on the stage while a painting is made and after. */
  scene(painting) {
    const { settings } = painting;
    const { size, experts } = this.studio.run;
    const routed = settings.model === "experts" && settings.expert === undefined && experts.length > 1;
    const legend = routed ? new Legend(painting, experts, this.studio.topics) : null;
    const pointing = { point: (expert) => legend.point(expert), pin: (expert) => legend.pin(expert) };
    const easels = painting.pictures.map((_, index) => new Easel(painting, index, { experts, size, pointing }));
    if (legend) legend.easels = easels;
    return [
      element("h2", {}, subject(settings)),
      element("p", { class: "recipe" }, recipe(settings)),
      this.going(painting),
      element("div", { class: "easels", "data-many": Math.min(settings.n, 5) }, easels.map(({ node }) => node)),
      legend?.node ?? "",
    ];
  }

  /** Progress, a way to stop, and what to do next. */
  going(painting) {
    const { settings } = painting;
    const bar = element("progress", { max: settings.steps, value: 0, "aria-label": "Steps painted" });
    const said = element("p", { class: "said" });
    const cancel = element("button", { type: "button", click: () => painting.cancel() }, "Cancel");
    const { prompt, label, steps, guidance, seed } = settings;
    const compare = element("a", { class: "button", href: hashOf("compare", { prompt, label, steps, guidance, seed }) }, "Compare painters");
    const node = element("div", { class: "going" }, bar, said, cancel, compare);
    const follow = () => {
      bar.value = painting.step;
      said.textContent = painting.saying;
      node.dataset.state = painting.state;
      [bar.hidden, cancel.hidden, compare.hidden] = [painting.over, painting.over, !painting.over];
      tell(painting);
      this.studio.mark.pulse(painting.over ? null : meanShares(painting));
    };
    painting.addEventListener("change", follow);
    follow();
    return node;
  }
}

/** Ctrl and Enter paint from everywhere in the form; Enter alone does in the prompt. */
function hurry(event) {
  const inPrompt = event.target.name === "prompt" && !event.shiftKey;
  if (event.key !== "Enter" || event.isComposing || !(inPrompt || event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  event.currentTarget.requestSubmit();
}

/** Screen readers hear of the quarters, not of every step. */
function tell(painting) {
  const { steps } = painting.settings;
  const quarter = Math.floor((4 * painting.step) / steps);
  const news = painting.state === "painting" ? `${25 * quarter} percent painted` : painting.saying;
  if (news !== painting.told) announce(news);
  painting.told = news;
}

function meanShares(painting) {
  const now = painting.pictures.map(({ decisions }) => decisions.at(-1)?.weights).filter(Boolean);
  const routed = painting.settings.model === "experts" && painting.settings.expert === undefined;
  return routed && now.length ? now[0].map((_, expert) => now.reduce((sum, part) => sum + part[expert], 0) / now.length) : null;
}

/** All that can paint: the routed experts, dense models, and each expert alone. */
function painters({ models, experts }) {
  const names = { experts: "Experts together", monolith: "Monolith", student: "Student" };
  const alone = models.includes("experts") ? experts.map(({ number: n }) => [`experts/${n}`, `Expert ${n} alone`]) : [];
  return [...models.map((name) => [name, names[name]]), ...alone];
}

/** The run's islands around what every picture starts from. */
function lagoon(experts) {
  const ring = drawn("svg", { viewBox: "0 0 40 40" });
  mark(ring, experts);
  return element("div", { class: "lagoon", "aria-hidden": "true" }, element("div", {}), ring);
}

function welcome({ experts, examples: captions }) {
  const who = experts.length > 1 ? `${plural(experts.length, "expert")} learned apart, each from its own cluster of pictures.` : "";
  return element(
    "div",
    { class: "welcome" },
    lagoon(experts),
    element("p", { class: "lead" }, `${who} Ask for a picture and watch who paints it.`),
    captions.length > 0 && element("p", {}, "Take an example, or type your own and press Enter."),
  );
}

function stillMissing({ missing }) {
  return element("p", { class: "note" }, `Not finished yet: ${missing.join(", ")}. `, element("a", { href: "#islands" }, "See the islands"));
}

function nothingYet({ missing, experts }) {
  return element(
    "div",
    { class: "welcome" },
    lagoon(experts),
    element("p", { class: "lead" }, missing.length ? "Nothing can paint yet: no expert is finished." : "The models are being opened."),
    missing.length > 0 && element("p", {}, `Missing: ${missing.join(", ")}.`),
    element("p", {}, "This page looks again by itself. ", element("a", { href: "#islands" }, "Watch the training on the islands")),
  );
}
