// Clusters: what each expert was trained on, and how.

import { pictureAt, read } from "./api.js";
import { element, swatch } from "./dom.js";
import { hashOf } from "./link.js";
import { compact, count, percent, plural, span } from "./words.js";

export class ClustersView {
  constructor(studio) {
    this.studio = studio;
    this.said = element("p", { class: "intro", role: "status" }, "Reading …");
    this.list = element("div", { class: "clusters" });
    this.node = element(
      "section",
      { class: "view", "aria-labelledby": "clusters-title" },
      element("h1", { id: "clusters-title", tabindex: -1 }, "Clusters"),
      this.said,
      this.list,
    );
  }

  async open() {
    if (this.list.childElementCount) return;
    try {
      const [{ clusters, why }, { experts }] = await Promise.all([read("/v1/clusters"), read("/v1/experts")]);
      this.draw(clusters, experts, why);
    } catch (error) {
      this.said.textContent = error.message;
    }
  }

  close() {}

  /** An expert may have been finished: read again when the view is next opened. */
  refresh() {
    this.list.replaceChildren();
  }

  draw(clusters, experts, why) {
    const numbers = [...new Set([...clusters.map(({ number }) => number), ...experts.map(({ cluster }) => cluster)])];
    const pictures = clusters.reduce((sum, cluster) => sum + cluster.pictures, 0);
    this.said.textContent = clusters.length
      ? `${count(pictures)} pictures in ${plural(clusters.length, "cluster")}. No expert ever sees those of another.`
      : (why ?? "The data of this run is not here.");
    this.list.replaceChildren(
      ...numbers.map((number) =>
        this.card(
          number,
          clusters.find((cluster) => cluster.number === number),
          experts.find((expert) => expert.cluster === number),
        ),
      ),
    );
  }

  card(number, cluster, expert) {
    const colour = expert?.colour ?? this.studio.run.experts.find((known) => known.number === number)?.colour ?? "var(--edge)";
    const name = expert ? `Expert ${expert.number}` : `Cluster ${number}`;
    const node = element(
      "article",
      { class: "cluster", "aria-labelledby": `cluster-${number}` },
      element("h2", { id: `cluster-${number}` }, swatch(colour), name),
      element("p", { class: "size" }, sizeOf(cluster, expert)),
      cluster?.sheet && sheet(cluster),
      cluster?.labels.length > 0 && bars(cluster.labels),
      cluster?.captions.length > 0 && captions(cluster.captions, this.studio.run.conditions.text),
      expert ? facts(expert) : element("p", { class: "note" }, "Its expert is not finished yet."),
    );
    node.style.setProperty("--expert", colour);
    return node;
  }
}

function sizeOf(cluster, expert) {
  const { pictures, share } = cluster ?? expert;
  return pictures ? `${plural(pictures, "picture")}, ${percent(share)} of all` : "";
}

function sheet({ number, sheet: path }) {
  const image = element("img", { alt: `Pictures of cluster ${number}`, class: "sheet" });
  pictureAt(path).then(
    (source) => (image.src = source),
    (error) => image.replaceWith(element("p", { class: "note" }, error.message)),
  );
  return image;
}

function bars(labels) {
  const bar = ({ name, share }) => {
    const node = element("li", {}, element("span", {}, name), element("span", {}, percent(share)));
    node.style.setProperty("--share", share);
    return node;
  };
  return element("ul", { class: "bars", "aria-label": "Classes in it" }, labels.map(bar));
}

/** Some of the captions; where prompts are understood, each is a link that paints it. */
function captions(list, paintable) {
  const link = (caption) => element("a", { class: "chip", href: hashOf("paint", { prompt: caption }) }, caption);
  const item = (caption) => element("li", {}, paintable ? link(caption) : caption);
  return element(
    "details",
    {},
    element("summary", {}, paintable ? "Captions to paint" : "Captions"),
    element("ul", { class: "examples" }, list.map(item)),
  );
}

function facts(expert) {
  const { objective, schedule, network, parameters, samples_trained: samples, seconds } = expert;
  const known = [
    ["objective", [objective, schedule].filter(Boolean).join(", ")],
    ["network", `${network}, ${compact(parameters)} parameters`],
    ["trained", samples ? `${count(samples)} samples${seconds ? ` in ${span(seconds)}` : ""}` : null],
  ];
  const row = ([name, value]) => [element("dt", {}, name), element("dd", {}, value)];
  return element("dl", { class: "facts" }, known.filter(([, value]) => value).flatMap(row));
}
