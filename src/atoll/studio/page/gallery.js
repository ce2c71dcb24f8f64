// Gallery: what was made in this browser. Every picture is a link with its settings; opening it paints it again.

import { element } from "./dom.js";
import { copyButton } from "./easel.js";
import { hashOf, linkTo } from "./link.js";
import { fileName, plural, recipe, subject } from "./words.js";

export class GalleryView {
  constructor(studio) {
    this.gallery = studio.gallery;
    this.said = element("p", { class: "intro" });
    this.list = element("ul", { class: "tiles" });
    this.empty = element("button", { type: "button", click: () => this.gallery.clear() }, "Empty the gallery");
    const title = element("h1", { id: "gallery-title", tabindex: -1 }, "Gallery");
    this.node = element(
      "section",
      { class: "view gallery", "aria-labelledby": "gallery-title" },
      element("div", { class: "headline" }, title, this.empty),
      this.said,
      this.list,
    );
    this.gallery.addEventListener("change", () => this.draw());
    this.draw();
  }

  open() {}

  close() {}

  refresh() {}

  draw() {
    const { entries, keeps } = this.gallery;
    const kept = keeps
      ? "This browser keeps the newest of them."
      : "This browser keeps nothing for this page: they are here until it is closed.";
    this.said.textContent = entries.length
      ? `${plural(entries.length, "picture")}. ${kept} A link holds the settings: who opens it paints the same picture.`
      : "Nothing here yet. Every picture that you paint comes here, with its settings in its link.";
    this.empty.hidden = !entries.length;
    this.list.replaceChildren(...entries.map((entry) => element("li", {}, this.tile(entry))));
  }

  tile(entry) {
    const { settings, picture, whole, index } = entry;
    const name = `${subject(settings)}${settings.n > 1 ? `, ${index + 1} of ${settings.n}` : ""}`;
    const image = element("img", { src: picture, alt: `${name}: paint again` });
    const link = hashOf("paint", settings);
    const file = `${fileName(settings)}-${index}.png`;
    const remove = () => this.gallery.remove(entry);
    return element(
      "figure",
      {},
      element("a", { class: "frame", href: link }, image),
      element("figcaption", {}, name, element("small", {}, recipe(settings))),
      element(
        "div",
        { class: "actions" },
        copyButton(linkTo("paint", settings)),
        whole && element("a", { class: "button", href: picture, download: file }, "Download"),
      ),
      element("button", { type: "button", class: "remove", "aria-label": `Remove ${name}`, click: remove }, "×"),
    );
  }
}
