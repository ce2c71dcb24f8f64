// Images generated in this browser, in localStorage; only in memory if the browser blocks storage.

const KEY = "atoll.gallery.2"; // entries of the first form had other names of settings
const MAX_IMAGES = 80; // of all runs together; older images are dropped
const MAX_CHARACTERS = 2_000_000; // of all images together; browsers allow about five million for a site
const MAX_FULL_SIZE = 60_000; // characters of an image that is stored unchanged; larger ones are scaled down
const THUMBNAIL_SIDE = 192; // pixels: about the width of a tile

/** Emits "change". Entries, the newest first: {run, settings, index, image, full, created}. */
export class GalleryStorage extends EventTarget {
  constructor(run) {
    super();
    this.run = run;
    this.persistent = true;
    this.all = this.load();
    // Other tabs write to the same storage.
    window.addEventListener("storage", ({ key }) => key === KEY && this.replace(this.load()));
  }

  get entries() {
    return this.all.filter(({ run }) => run === this.run);
  }

  load() {
    try {
      return validEntries(localStorage.getItem(KEY));
    } catch {
      this.persistent = false;
      return this.all ?? [];
    }
  }

  async add(settings, images) {
    const created = new Date().toISOString();
    const entries = await Promise.all(
      images.map(async (image, index) => ({ run: this.run, settings, index, created, ...(await reduced(image)) })),
    );
    // Load again: another tab may have added images since.
    this.save(newestThatFit([...entries, ...(this.persistent ? this.load() : this.all)]));
  }

  remove(entry) {
    this.save(this.all.filter((other) => other !== entry));
  }

  clear() {
    this.save(this.all.filter(({ run }) => run !== this.run));
  }

  save(entries) {
    try {
      localStorage.setItem(KEY, JSON.stringify(entries));
    } catch {
      this.persistent = false;
    }
    this.replace(entries);
  }

  replace(entries) {
    this.all = entries;
    this.dispatchEvent(new Event("change"));
  }
}

/** Parse stored entries; drop everything that this page did not write in this form. */
function validEntries(text) {
  const parsed = parseOr(text, []);
  const valid = (entry) => String(entry?.image).startsWith("data:image/") && entry.settings instanceof Object;
  return Array.isArray(parsed) ? parsed.filter(valid) : [];
}

function parseOr(text, fallback) {
  try {
    return JSON.parse(text) ?? fallback;
  } catch {
    return fallback;
  }
}

function newestThatFit(entries) {
  let left = MAX_CHARACTERS;
  return entries.slice(0, MAX_IMAGES).filter(({ image }) => (left -= image.length) >= 0);
}

/** Return the image itself if it is small, otherwise a thumbnail. */
async function reduced(image) {
  if (image.length <= MAX_FULL_SIZE) return { image, full: true };
  const original = new Image();
  original.src = image;
  await original.decode();
  const scale = THUMBNAIL_SIDE / Math.max(original.width, original.height);
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.round(scale * original.width), Math.round(scale * original.height)];
  canvas.getContext("2d").drawImage(original, 0, 0, canvas.width, canvas.height);
  return { image: canvas.toDataURL("image/webp", 0.85), full: false };
}
