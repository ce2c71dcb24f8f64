// One request for pictures, from the queue to the last step; views draw what it holds whenever it changes.

import { Refused, paint } from "./api.js";
import { span } from "./words.js";

const FRAMES = 16; // previews of one painting, at most about so many: enough to see it emerge

/** Emits "change" whenever anything changes, "experts" when they are not those the page knew. States: waiting, painting, done, cancelled, failed. */
export class Painting extends EventTarget {
  constructor(settings, studio) {
    super();
    this.settings = settings;
    this.studio = studio;
    this.experts = studio.run.experts; // in the order of the weights
    this.state = "waiting";
    this.saying = "Asking …";
    this.field = null;
    this.step = 0;
    this.pictures = Array.from({ length: settings.n }, () => ({ decisions: [], frames: [], made: null }));
    this.stopper = new AbortController();
  }

  get over() {
    return !["waiting", "painting"].includes(this.state);
  }

  /** Whether a router decides who paints. */
  get routed() {
    return this.settings.model === "experts" && this.settings.expert === undefined;
  }

  /** Paint, and resolve when it is over, however it ends. */
  async run() {
    const preview = Math.max(1, Math.round(this.settings.steps / FRAMES));
    try {
      for await (const { event, data } of paint({ ...this.settings, preview_every: preview }, this.stopper.signal)) {
        if (event === "queued" && this.routed) await this.meet(data.experts);
        this.hear(event, data);
      }
    } catch (error) {
      if (this.stopper.signal.aborted) this.become("cancelled", "Cancelled.");
      else if (error instanceof Refused) this.become("failed", error.message, error.field);
      else throw error;
    }
    return this;
  }

  /** Closing the stream tells the server. */
  cancel() {
    this.stopper.abort();
  }

  /** The server says who paints: an expert may have been finished since the page was opened. */
  async meet(numbers) {
    if (String(numbers) === String(this.experts.map(({ number }) => number))) return;
    this.experts = await this.studio.called(numbers);
    this.dispatchEvent(new Event("experts"));
  }

  hear(event, data) {
    const { steps } = this.settings;
    if (event === "busy") this.become("waiting", `The studio is busy. Trying again in ${span(data.seconds)}.`);
    if (event === "queued") this.become("waiting", data.position ? `Waiting: ${data.position} ahead.` : "Starting …");
    if (event === "step") this.advance(data);
    if (event === "image") this.pictures[data.index].made = `data:image/png;base64,${data.png}`;
    if (event === "image") this.become("painting", `Step ${steps} of ${steps}`);
    if (event === "done") this.become("done", `Done in ${span(data.seconds)}.`);
    if (event === "cancelled") this.become("cancelled", "Cancelled.");
    if (event === "failed") this.become("failed", data.message);
  }

  advance({ step, t, weights, previews }) {
    this.step = step;
    this.pictures.forEach(({ decisions, frames }, index) => {
      decisions.push({ t, weights: weights[index] });
      if (previews) frames.push({ step, source: `data:image/png;base64,${previews[index]}` });
    });
    this.become("painting", `Step ${step} of ${this.settings.steps}`);
  }

  become(state, saying, field = null) {
    Object.assign(this, { state, saying, field });
    this.dispatchEvent(new Event("change"));
  }

  /** What a picture looked like after so many steps; null is before the first preview. */
  frame(index, step) {
    const { frames, made } = this.pictures[index];
    if (made && step >= this.settings.steps) return made;
    return frames.findLast((frame) => frame.step <= step)?.source ?? null;
  }

  /** How much each expert counts, on the mean of all pictures and all steps so far; null before the first. */
  shares() {
    return mean(this.pictures.flatMap(({ decisions }) => decisions.map(({ weights }) => weights)));
  }

  /** The same of the newest step alone; null without a router. */
  sharesNow() {
    return this.routed && this.step ? mean(this.pictures.map(({ decisions }) => decisions.at(-1).weights)) : null;
  }
}

function mean(rows) {
  return rows.length ? rows[0].map((_, place) => rows.reduce((sum, row) => sum + row[place], 0) / rows.length) : null;
}
