// The view Generate: the form on one side, the images with their routing weights on the other.

import { announce, element } from "./dom.js";
import { ExpertLegend } from "./expert-legend.js";
import { conditionText, plural, settingsText } from "./format.js";
import { Generation } from "./generation.js";
import { ImageView } from "./image-view.js";
import { hashOf } from "./link.js";
import { largeLogo, noModel, RELOAD_MILLISECONDS } from "./no-model.js";
import { RequestForm } from "./request-form.js";

const WIDE = window.matchMedia("(min-width: 901px)"); // the form is beside the results; as in views.css

export class GenerateView {
  constructor(studio) {
    this.studio = studio;
    this.title = element("h1", { id: "generate-title", class: "visually-hidden", tabindex: -1 }, "Generate");
    this.results = element("div", { class: "results" });
    this.node = element("section", { class: "view generate", "aria-labelledby": "generate-title" });
    this.build();
  }

  /** Build the form and the results, or a message if no model is trained. */
  build() {
    const { run } = this.studio;
    if (!run.models.length) return this.node.replaceChildren(this.title, noModel(run));
    this.form = new RequestForm(run, () => this.generate(), WIDE.matches);
    if (!this.generation) this.results.replaceChildren(welcome(run));
    return this.node.replaceChildren(this.title, this.form.node, this.results);
  }

  /** Show the view. Settings in the link start a request, unless its results are shown already. */
  open(settings) {
    this.close();
    this.linkSettings = settings;
    const given = Object.keys(settings).length > 0;
    const shownHash = this.generation ? hashOf("generate", this.generation.settings) : null;
    if (!this.form) this.timer = setInterval(() => this.studio.reload(), RELOAD_MILLISECONDS);
    else if (shownHash && !given) history.replaceState(null, "", shownHash);
    else if (given && location.hash !== shownHash) {
      this.form.write(settings);
      this.generate();
    }
  }

  close() {
    clearInterval(this.timer);
  }

  /** Rebuild after a change of the run, for instance when an expert is trained; keep the values of the form. */
  refresh() {
    clearInterval(this.timer);
    const [first, values, focused] = [!this.form, this.form?.values(), document.activeElement?.name];
    this.build();
    if (values) this.form.write(values);
    if (focused) this.form?.node.elements.namedItem(focused)?.focus();
    if (first && this.node.isConnected) this.open(this.linkSettings);
  }

  async generate() {
    const settings = this.form.read();
    if (!settings) return;
    this.generation?.cancel();
    const generation = new Generation(settings, this.studio);
    this.generation = generation;
    history.replaceState(null, "", hashOf("generate", settings));
    // A later request may have replaced this one when its experts arrive.
    const show = () => this.generation === generation && this.results.replaceChildren(...this.resultNodes(generation));
    generation.addEventListener("experts", show);
    show();
    if (!WIDE.matches) this.results.scrollIntoView();
    await generation.run();
    if (generation.state === "failed") this.form.showError(generation.field, generation.status);
    if (generation.state === "done") this.studio.gallery.add(settings, generation.images.map(({ final }) => final));
  }

  resultNodes(generation) {
    const { settings, routed, experts } = generation;
    const legend = routed && experts.length > 1 ? new ExpertLegend(generation, this.studio.topics) : null;
    const views = generation.images.map((_, index) => new ImageView(generation, index, { legend }));
    if (legend) legend.views = views;
    return [
      element("h2", {}, conditionText(settings)),
      element("p", { class: "settings-text" }, settingsText(settings)),
      this.progressNode(generation),
      element(
        "div",
        { class: "images-and-legend", "data-count": Math.min(settings.num_images, 5) },
        element("div", { class: "image-views" }, views.map(({ node }) => node)),
        legend?.node,
      ),
    ];
  }

  /** Return the progress bar, a button to cancel, and a link to Compare. */
  progressNode(generation) {
    const { prompt, label, steps, guidance_scale, seed, width, height } = generation.settings;
    const bar = element("progress", { max: steps, value: 0, "aria-label": "Completed steps" });
    const status = element("p", { class: "status" });
    const cancel = element("button", { type: "button", click: () => generation.cancel() }, "Cancel");
    const hash = hashOf("compare", { prompt, label, steps, guidance_scale, seed, width, height });
    const compare = element("a", { class: "button", href: hash }, "Compare models");
    const node = element("div", { class: "generation-progress" }, bar, status, cancel, compare);
    const update = () => {
      bar.value = generation.step;
      status.textContent = generation.status;
      node.dataset.state = generation.state;
      [bar.hidden, cancel.hidden, compare.hidden] = [generation.ended, generation.ended, generation.state !== "done"];
      announceProgress(generation);
      this.studio.logo.resize(generation.ended ? null : generation.newestWeights());
    };
    generation.addEventListener("change", update);
    update();
    return node;
  }
}

/** Announce progress in quarters: every step would flood a screen reader. */
function announceProgress(generation) {
  const quarter = Math.floor((4 * generation.step) / generation.settings.steps);
  const text = generation.state === "generating" ? `${25 * quarter} percent generated` : generation.status;
  if (text !== generation.announced) announce(text);
  generation.announced = text;
}

function welcome(run) {
  const { experts, examples, conditioning } = run;
  const several = `${plural(experts.length, "expert")}, each trained on one cluster of the images. Generate an image to see the routing.`;
  return element(
    "div",
    { class: "welcome" },
    largeLogo(run),
    element("p", { class: "lead" }, experts.length > 1 ? several : "Generate images with this model."),
    conditioning.text && examples.length > 0 && element("p", {}, "Choose an example, or type a prompt and press Enter."),
  );
}
