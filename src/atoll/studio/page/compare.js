// Compare: painters (routings and dense models) by seeds, the same prompt for all, streaming in side by side.

import { announce, element } from "./dom.js";
import { copyButton } from "./easel.js";
import { choice, clear, complain, examples, field, number, subjectFields } from "./form.js";
import { hashOf, linkTo } from "./link.js";
import { Painting } from "./painting.js";
import { ribbon } from "./ribbon.js";
import { plural, routing, subject } from "./words.js";

const AT_ONCE = 4; // streams: a browser opens six connections to one server, and other views need theirs
const FIRST = ["top-1", "top-2", "full", "monolith"];
const SEEDS = 3;
const MOST_SEEDS = 6;
const EXAMPLES = 5;
const INTRO = "The same prompt and the same noise for every painter: a row is a painter, a column a seed.";
const NOBODY = "No model of this run is finished yet.";
const DENSE = { monolith: "one dense network of all data", student: "one dense network that learned from the experts" };

export class CompareView {
  constructor(studio) {
    this.studio = studio;
    this.paintings = [];
    this.stage = element("div", { class: "stage" });
    this.node = element("section", { class: "view compare", "aria-labelledby": "compare-title" });
    this.build();
  }

  build() {
    const painters = paintersOf(this.studio.run);
    const title = element("h1", { id: "compare-title", tabindex: -1 }, "Compare");
    const intro = element("p", { class: "intro" }, painters.length ? INTRO : NOBODY);
    if (!painters.length) return this.node.replaceChildren(title, intro);
    this.form = this.fields(this.studio.run, painters);
    this.write({});
    return this.node.replaceChildren(title, intro, this.form, this.stage);
  }

  fields(run, painters) {
    const { limits } = run;
    const many = Array.from({ length: MOST_SEEDS }, (_, index) => String(index + 1));
    this.subject = subjectFields(run);
    this.boxes = painters.map((name) => element("input", { type: "checkbox", name: "painters", value: name }));
    this.steps = number("steps", { min: 1, max: limits.steps });
    this.guidance = number("guidance", { min: 0, max: limits.guidance, step: "any" });
    this.seed = number("seed", { min: 0, max: Number.MAX_SAFE_INTEGER - MOST_SEEDS });
    this.seeds = choice("seeds", many.map((count) => [count, count]));
    this.go = element("button", { class: "primary", type: "submit" }, "Compare");
    this.stop = element("button", { type: "button", hidden: true, click: () => this.cancel() }, "Cancel");
    return element(
      "form",
      { class: "settings across", novalidate: true, "aria-label": "What to compare", submit: (event) => this.submit(event) },
      element(
        "div",
        {},
        this.subject.nodes,
        examples(run, EXAMPLES, (caption) => this.subject.write({ prompt: caption })),
      ),
      element(
        "fieldset",
        {},
        element("legend", {}, "Painters"),
        this.boxes.map((box) => element("label", { class: "tick" }, box, box.value)),
      ),
      element(
        "div",
        { class: "pair four" },
        field("First seed", this.seed),
        field("Seeds", this.seeds),
        field("Steps", this.steps),
        field("Guidance", this.guidance),
      ),
      element("div", { class: "actions" }, this.go, this.stop),
    );
  }

  write(given) {
    const { defaults } = this.studio.run;
    const settings = { painters: FIRST, seed: 0, seeds: SEEDS, ...defaults, ...given };
    this.subject.write(settings);
    this.boxes.forEach((box) => (box.checked = settings.painters.includes(box.value)));
    this.seed.value = settings.seed;
    this.seeds.value = String(Math.min(MOST_SEEDS, Math.max(1, settings.seeds)));
    this.steps.value = settings.steps;
    this.guidance.value = settings.guidance;
  }

  read() {
    return {
      ...this.subject.read(),
      painters: this.boxes.filter((box) => box.checked).map((box) => box.value),
      seed: this.seed.valueAsNumber,
      seeds: Number(this.seeds.value),
      steps: this.steps.valueAsNumber,
      guidance: this.guidance.valueAsNumber,
    };
  }

  /** A link with painters is a comparison to make; one without only fills the form. */
  open(settings) {
    if (!this.form || !Object.keys(settings).length || location.hash === this.address) return;
    this.write(settings);
    if (settings.painters) this.compare();
  }

  close() {}

  /** The run has changed: what is in the form stays; while pictures are made, everything does. */
  refresh() {
    if (this.paintings.some((painting) => !painting.over)) return;
    const kept = this.form ? this.read() : {};
    this.build();
    if (this.form) this.write(kept);
  }

  submit(event) {
    event.preventDefault();
    this.compare();
  }

  cancel() {
    this.paintings.forEach((painting) => painting.cancel());
  }

  async compare() {
    const settings = this.read();
    this.boxes[0].setCustomValidity(settings.painters.length ? "" : "Choose at least one painter.");
    if (!this.form.reportValidity()) return;
    clear(this.form);
    this.cancel();
    this.address = hashOf("compare", settings);
    history.replaceState(null, "", this.address);
    const rows = settings.painters.map((painter) => this.row(painter, settings));
    const paintings = rows[0].paintings.flatMap((_, column) => rows.map((row) => row.paintings[column]));
    this.paintings = paintings;
    this.stage.replaceChildren(this.caption(settings), ...rows.map(({ node }) => node));
    this.stop.hidden = false;
    announce(`${plural(paintings.length, "picture")} to paint`);
    await inTurn(paintings, AT_ONCE, (painting) => this.make(painting));
    if (this.paintings === paintings) this.finish(paintings);
  }

  async make(painting) {
    await painting.run();
    if (painting.state === "done") this.studio.gallery.add(painting.settings, [painting.pictures[0].made]);
  }

  finish(paintings) {
    this.stop.hidden = true;
    const done = paintings.filter(({ state }) => state === "done").length;
    announce(`${done} of ${plural(paintings.length, "picture")} painted`);
    const failed = paintings.find(({ state }) => state === "failed");
    if (failed) complain(this.form, failed.field, failed.saying);
  }

  caption(settings) {
    const link = copyButton(linkTo("compare", settings));
    return element("div", { class: "headline" }, element("h2", {}, subject(settings)), link);
  }

  row(painter, { seeds, seed, prompt, label, steps, guidance }) {
    const dense = painter in DENSE;
    const who = dense ? { model: painter } : { model: "experts", routing: painter };
    const shared = { prompt, label, ...who, steps, guidance, n: 1 };
    const paintings = Array.from({ length: seeds }, (_, column) => new Painting({ ...shared, seed: seed + column }, this.studio));
    const cost = element("p", { class: "cost" });
    const meaning = element("p", {}, DENSE[painter] ?? routing(painter));
    const node = element(
      "section",
      { class: "row", "aria-label": painter },
      element("div", { class: "who" }, element("h3", {}, painter), meaning, cost),
      element("ul", {}, paintings.map((painting) => element("li", {}, this.cell(painting, dense)))),
    );
    node.style.setProperty("--seeds", seeds);
    for (const painting of dense ? [] : paintings) {
      painting.addEventListener("change", () => (cost.textContent = spent(paintings)));
    }
    return { node, paintings };
  }

  cell(painting, dense) {
    const { size } = this.studio.run;
    const { settings } = painting;
    const picture = element("img", { alt: "", width: size[1], height: size[0] });
    const name = `seed ${settings.seed}: open in Paint`;
    const frame = element("a", { class: "frame empty", href: hashOf("paint", settings), "aria-label": name }, picture);
    const place = element("div", {});
    let strip = null;
    const lay = () => {
      strip = dense || painting.experts.length < 2 ? null : ribbon(painting.experts);
      place.replaceChildren(strip?.node ?? "");
    };
    lay();
    painting.addEventListener("experts", lay);
    const said = element("figcaption", {}, `seed ${settings.seed}`);
    frame.style.aspectRatio = `${size[1]} / ${size[0]}`;
    painting.addEventListener("change", () => {
      const source = painting.frame(0, painting.step);
      if (source) picture.src = source;
      frame.classList.toggle("empty", !source);
      frame.classList.toggle("busy", !painting.over);
      strip?.draw(painting.pictures[0].decisions, settings.steps);
      said.textContent = painting.state === "done" ? `seed ${settings.seed}` : painting.saying;
    });
    return element("figure", {}, frame, place, said);
  }
}

/** All that can be compared: ways of routing, and dense models. */
function paintersOf({ models, routings }) {
  return [...(models.includes("experts") ? routings : []), ...models.filter((name) => name in DENSE)];
}

/** How many experts run at a step, on average: what a routing costs. */
function spent(paintings) {
  const decisions = paintings.flatMap(({ pictures }) => pictures[0].decisions);
  const used = decisions.reduce((sum, { weights }) => sum + weights.filter((weight) => weight > 0).length, 0);
  return decisions.length ? `${(used / decisions.length).toFixed(1)} experts a step` : "";
}

/** Make all of a list in its order, so many at once. */
async function inTurn(list, width, make) {
  const waiting = [...list];
  const worker = async () => {
    while (waiting.length) await make(waiting.shift());
  };
  await Promise.all(Array.from({ length: width }, worker));
}
