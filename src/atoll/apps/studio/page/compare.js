// The view Compare: routings and dense models in rows, seeds in columns, with the same prompt and the same noise.

import { announce, element } from "./dom.js";
import { clearErrors, conditionFields, exampleButtons, field, numberInput, select, showFieldError, sizeField } from "./form.js";
import { conditionText, describeRouting, plural } from "./format.js";
import { Generation } from "./generation.js";
import { copyButton } from "./image-view.js";
import { hashOf, urlOf } from "./link.js";
import { noModel, RELOAD_MILLISECONDS } from "./no-model.js";
import { weightsChart } from "./weights-chart.js";

const MAX_STREAMS = 4; // a browser opens six connections to a server, and the other views need some
const DEFAULT_VARIANTS = ["top-1", "top-2", "full", "monolith"];
const DEFAULT_SEEDS = 3;
const MAX_SEEDS = 6; // columns that fit on a desktop screen
const EXAMPLES = 5;
const INTRO = "Rows are routings and models, columns are seeds. All images of a column start from the same noise.";
const DENSE = {
  monolith: "one network trained on all data",
  student: "one network distilled from the experts",
  students: "one few-step network for each expert",
  merged: "one network, the average of the experts",
};

/** A variant is a routing of the experts, or a dense model. */
export class CompareView {
  constructor(studio) {
    this.studio = studio;
    this.generations = [];
    this.results = element("div", { class: "results" });
    this.node = element("section", { class: "view compare", "aria-labelledby": "compare-title" });
    this.build();
  }

  build() {
    const variants = variantsOf(this.studio.run);
    const title = element("h1", { id: "compare-title", tabindex: -1 }, "Compare");
    if (!variants.length) return this.node.replaceChildren(title, noModel(this.studio.run));
    const intro = element("p", { class: "intro" }, INTRO);
    this.form = this.formNode(this.studio.run, variants);
    this.write({});
    return this.node.replaceChildren(title, intro, this.form, this.results);
  }

  formNode(run, variants) {
    const { limits } = run;
    const counts = Array.from({ length: MAX_SEEDS }, (_, index) => String(index + 1));
    this.condition = conditionFields(run);
    this.checkboxes = variants.map((name) => element("input", { type: "checkbox", name: "variants", value: name }));
    this.steps = numberInput("steps", { min: 1, max: limits.steps });
    this.guidanceScale = numberInput("guidance_scale", { min: 0, max: limits.guidance_scale, step: "any" });
    this.seed = numberInput("seed", { min: 0, max: Number.MAX_SAFE_INTEGER - MAX_SEEDS });
    this.seeds = select("seeds", counts.map((count) => [count, count]));
    this.size = sizeField(run);
    this.start = element("button", { class: "primary", type: "submit" }, "Compare");
    this.stop = element("button", { type: "button", hidden: true, click: () => this.cancel() }, "Cancel");
    return element(
      "form",
      { class: "settings two-columns", novalidate: true, "aria-label": "Compare", submit: (event) => this.submit(event) },
      element(
        "div",
        {},
        this.condition.nodes,
        exampleButtons(run, EXAMPLES, (caption) => this.condition.write({ prompt: caption })),
      ),
      element(
        "fieldset",
        {},
        element("legend", {}, "Routings and models"),
        this.checkboxes.map((box) => element("label", { class: "checkbox" }, box, box.value)),
      ),
      element(
        "div",
        { class: "pair four" },
        field("First seed", this.seed),
        field("Seeds", this.seeds),
        field("Steps", this.steps),
        field("Guidance scale", this.guidanceScale),
      ),
      this.size.node,
      element("div", { class: "actions" }, this.start, this.stop),
    );
  }

  write(given) {
    const { defaults } = this.studio.run;
    const settings = { variants: DEFAULT_VARIANTS, seed: 0, seeds: DEFAULT_SEEDS, ...defaults, ...given };
    this.condition.write(settings);
    this.checkboxes.forEach((box) => (box.checked = settings.variants.includes(box.value)));
    this.seed.value = settings.seed;
    this.seeds.value = String(Math.min(MAX_SEEDS, Math.max(1, settings.seeds)));
    this.steps.value = settings.steps;
    this.guidanceScale.value = settings.guidance_scale;
    this.size.write(settings);
  }

  read() {
    return {
      ...this.condition.read(),
      variants: this.checkboxes.filter((box) => box.checked).map((box) => box.value),
      seed: this.seed.valueAsNumber,
      seeds: Number(this.seeds.value),
      steps: this.steps.valueAsNumber,
      guidance_scale: this.guidanceScale.valueAsNumber,
      ...this.size.read(),
    };
  }

  /**
   * Show the view. A link with variants starts the comparison; one with other settings only fills the form. Without
   * settings, the first visit compares the first example, with one seed: an empty table would not explain itself.
   */
  open(settings) {
    this.close();
    this.linkSettings = settings;
    const given = Object.keys(settings).length > 0;
    if (!this.form) this.timer = setInterval(() => this.studio.reload(), RELOAD_MILLISECONDS);
    else if (given && location.hash !== this.hash) {
      this.write(settings);
      if (settings.variants) this.compare();
    } else if (!given && !this.generations.length) {
      this.write({ prompt: this.studio.run.examples[0], seeds: 1 });
      this.compare();
    }
  }

  close() {
    clearInterval(this.timer);
  }

  /** Rebuild after a change of the run, keeping the values of the form; not while images are generated. */
  refresh() {
    if (this.generations.some((generation) => !generation.ended)) return;
    const [first, values] = [!this.form, this.form ? this.read() : {}];
    this.build();
    if (this.form) this.write(values);
    if (first && this.node.isConnected) this.open(this.linkSettings);
  }

  submit(event) {
    event.preventDefault();
    this.compare();
  }

  cancel() {
    this.generations.forEach((generation) => generation.cancel());
  }

  async compare() {
    const settings = this.read();
    this.checkboxes[0].setCustomValidity(settings.variants.length ? "" : "Choose at least one routing or model.");
    if (!this.form.reportValidity()) return;
    clearErrors(this.form);
    this.cancel();
    this.hash = hashOf("compare", settings);
    history.replaceState(null, "", this.hash);
    const rows = settings.variants.map((variant) => this.row(variant, settings));
    // Column by column: the first seed of all variants is complete before the second begins.
    const generations = rows[0].generations.flatMap((_, column) => rows.map((row) => row.generations[column]));
    this.generations = generations;
    this.results.replaceChildren(this.caption(settings), ...rows.map(({ node }) => node));
    this.stop.hidden = false;
    announce(`Generating ${plural(generations.length, "image")}`);
    await runLimited(generations, MAX_STREAMS, (generation) => this.run(generation));
    if (this.generations === generations) this.finish(generations);
  }

  async run(generation) {
    await generation.run();
    if (generation.state === "done") this.studio.gallery.add(generation.settings, [generation.images[0].final]);
  }

  finish(generations) {
    this.stop.hidden = true;
    const done = generations.filter(({ state }) => state === "done").length;
    announce(`${done} of ${plural(generations.length, "image")} generated`);
    const failed = generations.find(({ state }) => state === "failed");
    if (failed) showFieldError(this.form, failed.field, failed.status);
  }

  caption(settings) {
    const link = copyButton(urlOf("compare", settings));
    return element("div", { class: "headline" }, element("h2", {}, conditionText(settings)), link);
  }

  row(variant, { seeds, seed, prompt, label, steps, guidance_scale, width, height }) {
    const dense = variant in DENSE;
    const model = dense ? { model: variant } : { model: "experts", routing: variant };
    const shared = { prompt, label, ...model, steps, guidance_scale, num_images: 1, width, height };
    const generations = Array.from({ length: seeds }, (_, column) => new Generation({ ...shared, seed: seed + column }, this.studio));
    const cost = element("p", { class: "cost" });
    const description = element("p", {}, DENSE[variant] ?? describeRouting(variant));
    const node = element(
      "section",
      { class: "row", "aria-label": variant },
      element("div", { class: "variant" }, element("h3", {}, variant), description, cost),
      element("ul", {}, generations.map((generation) => element("li", {}, this.cell(generation, dense)))),
    );
    node.style.setProperty("--seeds", seeds);
    for (const generation of dense ? [] : generations) {
      generation.addEventListener("change", () => (cost.textContent = expertsPerStep(generations)));
    }
    return { node, generations };
  }

  cell(generation, dense) {
    const { settings, size } = generation;
    const image = element("img", { alt: "", width: size[1], height: size[0] });
    const label = `seed ${settings.seed}: open in Generate`;
    const frame = element("a", { class: "frame empty", href: hashOf("generate", settings), "aria-label": label }, image);
    const chartNode = element("div", {});
    let chart = null;
    const buildChart = () => {
      chart = dense || generation.experts.length < 2 ? null : weightsChart(generation.experts);
      chartNode.replaceChildren(chart?.node ?? "");
    };
    buildChart();
    generation.addEventListener("experts", buildChart);
    const caption = element("figcaption", {}, `seed ${settings.seed}`);
    frame.style.aspectRatio = `${size[1]} / ${size[0]}`;
    generation.addEventListener("change", () => {
      const source = generation.frame(0, generation.step);
      if (source) image.src = source;
      frame.classList.toggle("empty", !source);
      frame.classList.toggle("busy", !generation.ended);
      chart?.draw(generation.images[0].decisions, settings.steps);
      caption.textContent = generation.state === "done" ? `seed ${settings.seed}` : generation.status;
    });
    return element("figure", {}, frame, chartNode, caption);
  }
}

/** Return all variants of a run: routings, if it has experts, and dense models. */
function variantsOf({ models, routings }) {
  return [...(models.includes("experts") ? routings : []), ...models.filter((name) => name in DENSE)];
}

/** Return the mean number of experts with a weight above 0 in a step, which is the cost of a routing. */
function expertsPerStep(generations) {
  const decisions = generations.flatMap(({ images }) => images[0].decisions);
  const used = decisions.reduce((sum, { weights }) => sum + weights.filter((weight) => weight > 0).length, 0);
  return decisions.length ? `${(used / decisions.length).toFixed(1)} experts per step` : "";
}

/** Run all items in order, at most `width` at the same time. */
async function runLimited(items, width, run) {
  const waiting = [...items];
  const worker = async () => {
    while (waiting.length) await run(waiting.shift());
  };
  await Promise.all(Array.from({ length: width }, worker));
}
