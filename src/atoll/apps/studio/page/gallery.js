// The view Gallery: images generated in this browser. Every image links to its settings in Generate.

import { element } from "./dom.js";
import { conditionText, fileName, plural, settingsText } from "./format.js";
import { copyButton } from "./image-view.js";
import { hashOf, urlOf } from "./link.js";

export class GalleryView {
  constructor(studio) {
    this.gallery = studio.gallery;
    this.intro = element("p", { class: "intro" });
    this.list = element("ul", { class: "tiles" });
    this.clear = element("button", { type: "button", click: () => this.gallery.clear() }, "Clear the gallery");
    const title = element("h1", { id: "gallery-title", tabindex: -1 }, "Gallery");
    this.node = element(
      "section",
      { class: "view gallery", "aria-labelledby": "gallery-title" },
      element("div", { class: "headline" }, title, this.clear),
      this.intro,
      this.list,
    );
    this.gallery.addEventListener("change", () => this.draw());
    this.draw();
  }

  open() {}

  close() {}

  refresh() {}

  draw() {
    const { entries, persistent } = this.gallery;
    const stored = persistent
      ? "This browser stores the newest ones."
      : "This browser blocks storage: they are lost when the page is closed.";
    this.intro.textContent = entries.length
      ? `${plural(entries.length, "image")}. ${stored} A link contains the settings, so opening it generates the same image.`
      : "No images yet. Images that you generate appear here.";
    this.clear.hidden = !entries.length;
    this.list.replaceChildren(...entries.map((entry) => element("li", {}, this.tile(entry))));
  }

  tile(entry) {
    const { settings, image, full, index } = entry;
    const name = `${conditionText(settings)}${settings.num_images > 1 ? `, ${index + 1} of ${settings.num_images}` : ""}`;
    const file = `${fileName(settings)}-${index}.png`;
    const remove = () => this.gallery.remove(entry);
    return element(
      "figure",
      {},
      element(
        "a",
        { class: "frame", href: hashOf("generate", settings) },
        element("img", { src: image, alt: `${name}: generate again` }),
      ),
      element("figcaption", {}, name, element("small", {}, settingsText(settings))),
      element(
        "div",
        { class: "actions" },
        copyButton(urlOf("generate", settings)),
        // A thumbnail is not the original file and lacks the settings in the PNG.
        full && element("a", { class: "button", href: image, download: file }, "Download"),
      ),
      element("button", { type: "button", class: "remove", "aria-label": `Remove ${name}`, click: remove }, "×"),
    );
  }
}
