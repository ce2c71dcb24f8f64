// The view Clusters: the training data of each expert, and its objective and network.

import { getJson, imageUrl } from "./api.js";
import { element, swatch } from "./dom.js";
import { compact, count, duration, percent, plural } from "./format.js";
import { hashOf } from "./link.js";

export class ClustersView {
  constructor(studio) {
    this.studio = studio;
    this.intro = element("p", { class: "intro", role: "status" }, "Loading …");
    this.list = element("div", { class: "clusters" });
    this.node = element(
      "section",
      { class: "view", "aria-labelledby": "clusters-title" },
      element("h1", { id: "clusters-title", tabindex: -1 }, "Clusters"),
      this.intro,
      this.list,
    );
  }

  async open() {
    if (this.list.childElementCount) return;
    try {
      const [{ clusters, reason }, { experts }] = await Promise.all([getJson("/v1/clusters"), getJson("/v1/experts")]);
      this.draw(clusters, experts, reason);
    } catch (error) {
      this.intro.textContent = error.message;
    }
  }

  close() {}

  /** Load everything again when the view is opened next: an expert may be trained now. */
  refresh() {
    this.list.replaceChildren();
  }

  draw(clusters, experts, reason) {
    const numbers = [...new Set([...clusters.map(({ number }) => number), ...experts.map(({ cluster }) => cluster)])];
    const images = clusters.reduce((sum, cluster) => sum + cluster.images, 0);
    this.intro.textContent = clusters.length
      ? `${count(images)} training images in ${plural(clusters.length, "cluster")}. Each expert is trained on one cluster only.`
      : (reason ?? "The data of this run is not available.");
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
    const color = expert?.color ?? this.studio.run.experts.find((known) => known.number === number)?.color ?? "var(--border-strong)";
    const name = expert ? `Expert ${expert.number}` : `Cluster ${number}`;
    const node = element(
      "article",
      { class: "cluster", "aria-labelledby": `cluster-${number}` },
      element("h2", { id: `cluster-${number}` }, swatch(color), name),
      element("p", { class: "size" }, sizeText(cluster, expert)),
      cluster?.contact_sheet && contactSheet(cluster),
      cluster?.labels.length > 0 && labelBars(cluster.labels),
      cluster?.captions.length > 0 && captionList(cluster.captions, this.studio.run.conditioning.text),
      expert ? expertInfo(expert) : element("p", { class: "note" }, "This expert is not trained yet."),
    );
    node.style.setProperty("--expert", color);
    return node;
  }
}

function sizeText(cluster, expert) {
  const { images, share } = cluster ?? expert;
  return images ? `${plural(images, "image")}, ${percent(share)} of all` : "";
}

function contactSheet({ number, contact_sheet: path }) {
  const image = element("img", { alt: `Images of cluster ${number}`, class: "sheet" });
  imageUrl(path).then(
    (source) => (image.src = source),
    (error) => image.replaceWith(element("p", { class: "note" }, error.message)),
  );
  return image;
}

function labelBars(labels) {
  const bar = ({ name, share }) => {
    const node = element("li", {}, element("span", {}, name), element("span", {}, percent(share)));
    node.style.setProperty("--share", share);
    return node;
  };
  return element("ul", { class: "bars", "aria-label": "Classes" }, labels.map(bar));
}

/** Return a list of captions; if the run takes prompts, each links to Generate. */
function captionList(captions, linked) {
  const link = (caption) => element("a", { class: "chip", href: hashOf("generate", { prompt: caption }) }, caption);
  const item = (caption) => element("li", {}, linked ? link(caption) : caption);
  return element(
    "details",
    {},
    element("summary", {}, linked ? "Captions (click to generate)" : "Captions"),
    element("ul", { class: "examples" }, captions.map(item)),
  );
}

function expertInfo(expert) {
  const { objective, schedule, network, parameters, images_seen: images, seconds } = expert;
  const rows = [
    ["Objective", [objective, schedule].filter(Boolean).join(", ")],
    ["Network", `${network}, ${compact(parameters)} parameters`],
    ["Training", images ? `${count(images)} images seen${seconds ? ` in ${duration(seconds)}` : ""}` : null],
  ];
  const row = ([name, value]) => [element("dt", {}, name), element("dd", {}, value)];
  return element("dl", { class: "info" }, rows.filter(([, value]) => value).flatMap(row));
}
