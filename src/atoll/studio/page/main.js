// The studio: opens the run, and shows the view that the address names.

import { Refused, read } from "./api.js";
import { ClustersView } from "./clusters.js";
import { CompareView } from "./compare.js";
import { element } from "./dom.js";
import { GalleryView } from "./gallery.js";
import { IslandsView } from "./islands.js";
import { readHash } from "./link.js";
import { mark } from "./mark.js";
import { noise } from "./noise.js";
import { PaintView } from "./paint.js";
import { Gallery } from "./store.js";

const VIEWS = {
  paint: PaintView,
  compare: CompareView,
  gallery: GalleryView,
  clusters: ClustersView,
  islands: IslandsView,
};
const TINY = 32; // pictures of so few pixels are shown as such
const main = document.getElementById("main");

/** What all views share. */
class Studio {
  constructor(run) {
    this.gallery = new Gallery(run.name);
    this.topics = new Map();
    this.take(run);
    this.views = Object.fromEntries(Object.entries(VIEWS).map(([name, View]) => [name, new View(this)]));
  }

  take(run) {
    this.run = run;
    this.mark = mark(document.querySelector(".mark"), run);
    document.getElementById("run").textContent = run.name;
    document.body.classList.toggle("tiny", Math.max(...(run.size ?? [])) <= TINY);
  }

  /** Read the run again, and tell the views if it has changed. */
  async reload() {
    const run = await read("/v1/run").catch(unanswered);
    if (!run || JSON.stringify(run) === JSON.stringify(this.run)) return;
    this.take(run);
    Object.values(this.views).forEach((view) => view.refresh());
    await this.learnTopics();
  }

  /** The experts of these numbers; one that the page does not know has been finished meanwhile. */
  async called(numbers) {
    const known = (number) => this.run.experts.find((expert) => expert.number === number);
    if (!numbers.every(known)) await this.reload();
    return numbers.map((number) => known(number) ?? { number, colour: "var(--edge)" });
  }

  /** What each expert is about, in a word or two: the classes that make up most of its cluster. */
  async learnTopics() {
    const { clusters } = await read("/v1/clusters");
    for (const { number, labels } of clusters) {
      const most = labels.slice(0, labels[0]?.share > 0.6 ? 1 : 2);
      this.topics.set(number, most.map(({ name }) => name).join(", "));
    }
  }

  /** Show the view that the address names. */
  route() {
    const { view: asked, settings } = readHash(location.hash);
    const name = asked in VIEWS ? asked : "paint";
    const view = this.views[name];
    const changed = view !== this.current;
    if (changed) this.enter(name, view);
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
    window.scrollTo({ top: 0, behavior: "instant" });
    view.node.querySelector("h1").focus({ preventScroll: true });
  }
}

/** A server that does not answer now is asked again later; anything else is a mistake. */
function unanswered(error) {
  if (!(error instanceof Refused)) throw error;
}

async function start() {
  try {
    const studio = new Studio(await read("/v1/run"));
    await studio.learnTopics();
    studio.route();
    window.addEventListener("hashchange", () => studio.route());
  } catch (error) {
    main.replaceChildren(element("p", { class: "problem", role: "alert" }, error.message));
    if (!(error instanceof Refused)) throw error;
  }
}

document.documentElement.style.setProperty("--noise", noise());
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the view and its settings
  main.focus();
});
start();
