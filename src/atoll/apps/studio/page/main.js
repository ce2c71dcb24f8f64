// Entry point: load the run, and show the view of the URL.

import { ApiError, getJson } from "./api.js";
import { ClustersView } from "./clusters.js";
import { CompareView } from "./compare.js";
import { element } from "./dom.js";
import { GalleryStorage } from "./gallery-storage.js";
import { GalleryView } from "./gallery.js";
import { GenerateView } from "./generate.js";
import { IslandsView } from "./islands.js";
import { readHash } from "./link.js";
import { drawLogo } from "./logo.js";
import { noise } from "./noise.js";

const VIEWS = {
  generate: GenerateView,
  compare: CompareView,
  gallery: GalleryView,
  clusters: ClustersView,
  islands: IslandsView,
};
const PIXELATED_SIDE = 32; // images up to this side are enlarged without smoothing, which would only blur them
const MAJORITY = 0.6; // a class with more than this share names its cluster alone
const main = document.getElementById("main");

/** State that all views share. */
class Studio {
  constructor(run) {
    this.gallery = new GalleryStorage(run.name);
    this.topics = new Map();
    this.setRun(run);
    this.views = Object.fromEntries(Object.entries(VIEWS).map(([name, View]) => [name, new View(this)]));
  }

  setRun(run) {
    this.run = run;
    this.logo = drawLogo(document.querySelector(".logo"), run);
    document.getElementById("run").textContent = run.name;
    document.body.classList.toggle("pixelated", Math.max(...(run.size ?? [])) <= PIXELATED_SIDE);
  }

  /** Load the run again, and refresh the views if it has changed. */
  async reload() {
    const run = await getJson("/v1/run").catch(ignoreApiError);
    if (!run || JSON.stringify(run) === JSON.stringify(this.run)) return;
    this.setRun(run);
    Object.values(this.views).forEach((view) => view.refresh());
    await this.loadTopics();
  }

  /** Return the experts with these numbers. An unknown number belongs to an expert that was trained meanwhile. */
  async expertsByNumber(numbers) {
    const known = (number) => this.run.experts.find((expert) => expert.number === number);
    if (!numbers.every(known)) await this.reload();
    return numbers.map((number) => known(number) ?? { number, color: "var(--border-strong)" });
  }

  /** Name each expert by the most frequent class of its cluster, or by the two most frequent ones. */
  async loadTopics() {
    const { clusters } = await getJson("/v1/clusters");
    for (const { number, labels } of clusters) {
      const names = labels.slice(0, labels[0]?.share > MAJORITY ? 1 : 2);
      this.topics.set(number, names.map(({ name }) => name).join(", "));
    }
  }

  /** Show the view of the URL. */
  route() {
    const { view: requested, settings } = readHash(location.hash);
    const name = requested in VIEWS ? requested : "generate";
    const view = this.views[name];
    if (view !== this.current) this.enter(name, view);
    view.open(settings);
  }

  enter(name, view) {
    this.current?.close();
    const first = !this.current;
    this.current = view;
    main.replaceChildren(view.node);
    document.title = `${name[0].toUpperCase()}${name.slice(1)} · ${this.run.name} · Atoll studio`;
    for (const link of document.querySelectorAll("nav a")) {
      if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    if (first) return;
    // As if a new page were loaded: from the top, with the focus on its heading for screen readers.
    window.scrollTo({ top: 0, behavior: "instant" });
    view.node.querySelector("h1").focus({ preventScroll: true });
  }
}

/** Ignore errors of the server, because a later reload may succeed; throw programming errors. */
function ignoreApiError(error) {
  if (!(error instanceof ApiError)) throw error;
}

async function start() {
  try {
    const studio = new Studio(await getJson("/v1/run"));
    await studio.loadTopics();
    studio.route();
    window.addEventListener("hashchange", () => studio.route());
  } catch (error) {
    main.replaceChildren(element("p", { class: "problem", role: "alert" }, error.message));
    if (!(error instanceof ApiError)) throw error;
  }
}

document.documentElement.style.setProperty("--noise", noise());
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // following the link would replace the hash, which holds the view and its settings
  main.focus();
});
start();
