// The form of the view Generate: the condition, the model and the sampling settings.

import { element } from "./dom.js";
import { clearErrors, conditionFields, exampleButtons, field, numberInput, select, selectValue, showFieldError, sizeField } from "./form.js";
import { describeRouting } from "./format.js";

const RANDOM_SEEDS = 1_000_000; // random seeds are below this: short enough to read and type
const EXAMPLES = 8;
const MODELS = { experts: "All experts", students: "Few-step students", monolith: "Monolith", student: "Student", merged: "Merged" };

/** The settings of one request as form fields; `generate` is called on submit. */
export class RequestForm {
  constructor(run, generate, settingsOpen) {
    const { limits } = run;
    Object.assign(this, { run, generate });
    this.condition = conditionFields(run);
    this.model = select("model", modelOptions(run));
    this.routing = select("routing", run.routings.map((name) => [name, name]));
    this.routingText = element("small", { class: "routing-text" });
    this.steps = numberInput("steps", { min: 1, max: limits.steps });
    this.guidanceScale = numberInput("guidance_scale", { min: 0, max: limits.guidance_scale, step: "any" });
    this.seed = numberInput("seed", { min: 0, max: Number.MAX_SAFE_INTEGER });
    this.numImages = numberInput("num_images", { min: 1, max: limits.num_images });
    this.size = sizeField(run);
    this.settings = this.settingsNode(settingsOpen);
    this.node = element(
      "form",
      {
        class: "settings", novalidate: true, "aria-label": "Generate images", keydown: submitOnEnter,
        submit: (event) => this.submit(event), change: () => this.updateRouting(),
      },
      this.condition.nodes,
      exampleButtons(run, EXAMPLES, (caption) => this.useExample(caption)),
      element("button", { class: "primary", type: "submit" }, "Generate"),
      this.settings,
      run.missing.length > 0 && missingNote(run),
    );
    this.write({});
  }

  settingsNode(open) {
    const { run } = this;
    return element(
      "details",
      { open },
      element("summary", {}, "Settings"),
      element(
        "div",
        { class: "pair" },
        modelOptions(run).length > 1 && field("Model", this.model),
        run.experts.length > 1 && field("Routing", this.routing),
      ),
      this.routingText,
      element("div", { class: "pair" }, field("Steps", this.steps), field("Guidance scale", this.guidanceScale)),
      element("div", { class: "pair" }, field("Seed", this.seed), field("Images", this.numImages)),
      this.size.node,
      element("button", { type: "button", click: () => this.randomSeed() }, "Generate with a new seed"),
    );
  }

  updateRouting() {
    const routed = this.model.value === "experts";
    this.routing.disabled = !routed;
    this.routingText.textContent = routed && this.run.experts.length > 1 ? describeRouting(this.routing.value) : "";
  }

  /** Return the settings; if a field is invalid, show its error and return null. */
  read() {
    clearErrors(this.node);
    // The browser can only point at an invalid field that is visible.
    if (!this.node.checkValidity()) this.settings.open = true;
    return this.node.reportValidity() ? this.values() : null;
  }

  /** Return the values of the fields, valid or not. */
  values() {
    const [model, expert] = this.model.value.split("/");
    return {
      ...this.condition.read(),
      model,
      expert: expert === undefined ? undefined : Number(expert),
      routing: this.model.value === "experts" ? this.routing.value : undefined,
      steps: this.steps.valueAsNumber,
      guidance_scale: this.guidanceScale.valueAsNumber,
      seed: this.seed.valueAsNumber,
      num_images: this.numImages.valueAsNumber,
      ...this.size.read(),
    };
  }

  /** Fill the form; missing values are the defaults of the run. */
  write(given) {
    const settings = { model: this.run.models[0], seed: 0, ...this.run.defaults, ...given };
    this.condition.write(settings);
    selectValue(this.model, settings.expert === undefined ? settings.model : `experts/${settings.expert}`);
    if (settings.routing) selectValue(this.routing, settings.routing);
    this.steps.value = settings.steps;
    this.guidanceScale.value = settings.guidance_scale;
    this.seed.value = settings.seed;
    this.numImages.value = settings.num_images;
    this.size.write(settings);
    this.updateRouting();
  }

  randomSeed() {
    this.seed.value = Math.floor(RANDOM_SEEDS * Math.random());
    this.generate();
  }

  useExample(caption) {
    this.condition.write({ prompt: caption });
    this.generate();
  }

  submit(event) {
    event.preventDefault();
    this.generate();
  }

  /** Show an error of the server beside its field. */
  showError(name, message) {
    if (!name) return;
    this.settings.open = true;
    showFieldError(this.node, name, message);
  }
}

/** Return the choices of a model: the routed experts, the dense models, and each expert alone. */
function modelOptions({ models, experts }) {
  const single = models.includes("experts") && experts.length > 1 ? experts : [];
  return [
    ...models.map((name) => [name, MODELS[name]]),
    ...single.map((expert) => [`experts/${expert.number}`, `Expert ${expert.number} only`]),
  ];
}

function missingNote({ missing }) {
  const islands = element("a", { href: "#islands" }, "Show training");
  return element("p", { class: "note" }, `Not trained yet: ${missing.join(", ")}. `, islands);
}

/** Submit on Ctrl+Enter in every field, and on Enter in the prompt. */
function submitOnEnter(event) {
  const inPrompt = event.target.name === "prompt" && !event.shiftKey;
  if (event.key !== "Enter" || event.isComposing || !(inPrompt || event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  event.currentTarget.requestSubmit();
}
