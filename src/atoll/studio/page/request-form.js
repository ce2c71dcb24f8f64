// The form of Paint: what to paint, who paints it, and how.

import { element } from "./dom.js";
import { choice, choose, clear, complain, examples, field, number, subjectFields } from "./form.js";
import { routing } from "./words.js";

const SEEDS = 1_000_000;
const EXAMPLES = 8;
const PAINTERS = { experts: "All experts", monolith: "Monolith", student: "Student" };

/** The settings of one request, as fields; `paint` is called when they are to be painted. */
export class RequestForm {
  constructor(run, paint, unfolded) {
    const { limits } = run;
    Object.assign(this, { run, paint });
    this.subject = subjectFields(run);
    this.painter = choice("model", painters(run));
    this.routing = choice("routing", run.routings.map((name) => [name, name]));
    this.meaning = element("small", { class: "meaning" });
    this.steps = number("steps", { min: 1, max: limits.steps });
    this.guidance = number("guidance", { min: 0, max: limits.guidance, step: "any" });
    this.seed = number("seed", { min: 0, max: Number.MAX_SAFE_INTEGER });
    this.many = number("n", { min: 1, max: limits.n });
    this.settings = this.fold(unfolded);
    this.node = element(
      "form",
      {
        class: "settings", novalidate: true, "aria-label": "What to paint", keydown: hurry,
        submit: (event) => this.submit(event), change: () => this.explain(),
      },
      this.subject.nodes,
      examples(run, EXAMPLES, (caption) => this.take(caption)),
      element("button", { class: "primary", type: "submit" }, "Paint"),
      this.settings,
      run.missing.length > 0 && stillMissing(run),
    );
    this.write({});
  }

  fold(open) {
    const { run } = this;
    return element(
      "details",
      { open },
      element("summary", {}, "Settings"),
      element(
        "div",
        { class: "pair" },
        painters(run).length > 1 && field("Painter", this.painter),
        run.experts.length > 1 && field("Routing", this.routing),
      ),
      this.meaning,
      element("div", { class: "pair" }, field("Steps", this.steps), field("Guidance", this.guidance)),
      element("div", { class: "pair" }, field("Seed", this.seed), field("Pictures", this.many)),
      element("button", { type: "button", click: () => this.roll() }, "Paint with a new seed"),
    );
  }

  explain() {
    const together = this.painter.value === "experts";
    this.routing.disabled = !together;
    this.meaning.textContent = together && this.run.experts.length > 1 ? routing(this.routing.value) : "";
  }

  /** The settings; null, and a word to the user, if a field is not as it should be. */
  read() {
    clear(this.node);
    if (!this.node.checkValidity()) this.settings.open = true;
    return this.node.reportValidity() ? this.values() : null;
  }

  /** What is in the fields, right or wrong. */
  values() {
    const [model, expert] = this.painter.value.split("/");
    return {
      ...this.subject.read(),
      model,
      expert: expert === undefined ? undefined : Number(expert),
      routing: this.painter.value === "experts" ? this.routing.value : undefined,
      steps: this.steps.valueAsNumber,
      guidance: this.guidance.valueAsNumber,
      seed: this.seed.valueAsNumber,
      n: this.many.valueAsNumber,
    };
  }

  /** Fill the form; what is not given is as the run proposes. */
  write(given) {
    const settings = { model: this.run.models[0], seed: 0, ...this.run.defaults, ...given };
    this.subject.write(settings);
    choose(this.painter, settings.expert === undefined ? settings.model : `experts/${settings.expert}`);
    if (settings.routing) choose(this.routing, settings.routing);
    this.steps.value = settings.steps;
    this.guidance.value = settings.guidance;
    this.seed.value = settings.seed;
    this.many.value = settings.n;
    this.explain();
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

  /** The server found fault with a field. */
  complain(name, message) {
    if (!name) return;
    this.settings.open = true;
    complain(this.node, name, message);
  }
}

/** All that can paint: the routed experts, dense models, and each expert alone. */
function painters({ models, experts }) {
  const alone = models.includes("experts") && experts.length > 1 ? experts : [];
  return [
    ...models.map((name) => [name, PAINTERS[name]]),
    ...alone.map((expert) => [`experts/${expert.number}`, `Expert ${expert.number} alone`]),
  ];
}

function stillMissing({ missing }) {
  const islands = element("a", { href: "#islands" }, "See the islands");
  return element("p", { class: "note" }, `Not finished yet: ${missing.join(", ")}. `, islands);
}

/** Ctrl and Enter paint from everywhere in the form; Enter alone does in the prompt. */
function hurry(event) {
  const inPrompt = event.target.name === "prompt" && !event.shiftKey;
  if (event.key !== "Enter" || event.isComposing || !(inPrompt || event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  event.currentTarget.requestSubmit();
}
