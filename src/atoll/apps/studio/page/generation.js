// One generation request, from the queue to the last step. Views redraw whenever it changes.

import { ApiError, generate } from "./api.js";
import { duration } from "./format.js";

const PREVIEWS = 16; // about this many previews of each image: a smooth sequence without much traffic

/**
 * Emits "change" on every change, and "experts" if the experts of the run are not those that the page has loaded.
 * States: waiting, generating, done, cancelled, failed.
 */
export class Generation extends EventTarget {
  constructor(settings, studio) {
    super();
    this.settings = settings;
    this.studio = studio;
    this.experts = studio.run.experts; // in the order of the weights
    this.state = "waiting";
    this.status = "Sending the request …";
    this.field = null;
    this.step = 0;
    // For each image: routing weights by step, previews by step, and the final image as a data URL.
    this.images = Array.from({ length: settings.num_images }, () => ({ decisions: [], previews: [], final: null }));
    this.controller = new AbortController();
  }

  /** Height and width of the images. */
  get size() {
    const { width, height } = this.settings;
    return width && height ? [height, width] : this.studio.run.size;
  }

  get ended() {
    return !["waiting", "generating"].includes(this.state);
  }

  /** Whether routing weights of several experts are of interest. */
  get routed() {
    return this.settings.model === "experts" && this.settings.expert === undefined;
  }

  /** Run the request; resolve when it ends in any way. */
  async run() {
    const every = Math.max(1, Math.round(this.settings.steps / PREVIEWS));
    try {
      for await (const { event, data } of generate({ ...this.settings, preview_every: every }, this.controller.signal)) {
        if (event === "queued" && this.routed) await this.updateExperts(data.experts);
        this.handle(event, data);
      }
    } catch (error) {
      if (this.controller.signal.aborted) this.setState("cancelled", "Cancelled.");
      else if (error instanceof ApiError) this.setState("failed", error.message, error.field);
      else throw error;
    }
    return this;
  }

  /** Cancel: closing the connection cancels the request on the server. */
  cancel() {
    this.controller.abort();
  }

  /** The server sends the numbers of its experts: one may have been trained since the page was loaded. */
  async updateExperts(numbers) {
    if (String(numbers) === String(this.experts.map(({ number }) => number))) return;
    this.experts = await this.studio.expertsByNumber(numbers);
    this.dispatchEvent(new Event("experts"));
  }

  handle(event, data) {
    const { steps } = this.settings;
    if (event === "busy") this.setState("waiting", `The server is busy. Retrying in ${duration(data.seconds)}.`);
    if (event === "queued") this.setState("waiting", data.position ? `Waiting: ${data.position} ahead.` : "Starting …");
    if (event === "step") this.addStep(data);
    if (event === "image") this.images[data.index].final = `data:image/png;base64,${data.png}`;
    if (event === "image") this.setState("generating", `Step ${steps} of ${steps}`);
    if (event === "done") this.setState("done", `Done in ${duration(data.seconds)}.`);
    if (event === "cancelled") this.setState("cancelled", "Cancelled.");
    if (event === "failed") this.setState("failed", data.message);
  }

  addStep({ step, t, weights, previews }) {
    this.step = step;
    this.images.forEach((image, index) => {
      image.decisions.push({ t, weights: weights[index] });
      if (previews) image.previews.push({ step, source: `data:image/png;base64,${previews[index]}` });
    });
    this.setState("generating", `Step ${step} of ${this.settings.steps}`);
  }

  setState(state, status, field = null) {
    Object.assign(this, { state, status, field });
    this.dispatchEvent(new Event("change"));
  }

  /** Return the newest preview of an image at a step, or the final image; null before the first preview. */
  frame(index, step) {
    const { previews, final } = this.images[index];
    if (final && step >= this.settings.steps) return final;
    return previews.findLast((preview) => preview.step <= step)?.source ?? null;
  }

  /** Return each expert's weight, averaged over all images and all steps so far; null before the first step. */
  meanWeights() {
    return mean(this.images.flatMap(({ decisions }) => decisions.map(({ weights }) => weights)));
  }

  /** Return each expert's weight in the newest step, averaged over images; null without routing. */
  newestWeights() {
    return this.routed && this.step ? mean(this.images.map(({ decisions }) => decisions.at(-1).weights)) : null;
  }
}

/** Return the mean of rows, column by column. */
function mean(rows) {
  return rows.length ? rows[0].map((_, column) => rows.reduce((sum, row) => sum + row[column], 0) / rows.length) : null;
}
