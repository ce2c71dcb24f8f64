// What was made in this browser: settings and small pictures, within a bound; in memory alone if storage is refused.

const KEY = "atoll.gallery";
const MOST = 80; // pictures
const ROOM = 2_000_000; // characters of all pictures together; browsers allow about five million
const SMALL = 60_000; // characters of a picture that is kept as it is; of larger ones a smaller copy
const SIDE = 192; // pixels of such a copy

/** Emits "change". Entries, the newest first: {run, settings, index, picture, whole, made}. */
export class Gallery extends EventTarget {
  constructor(run) {
    super();
    this.run = run;
    this.keeps = true;
    this.all = this.load();
    window.addEventListener("storage", ({ key }) => key === KEY && this.become(this.load()));
  }

  get entries() {
    return this.all.filter(({ run }) => run === this.run);
  }

  load() {
    try {
      return wellFormed(localStorage.getItem(KEY));
    } catch {
      this.keeps = false;
      return this.all ?? [];
    }
  }

  async add(settings, pictures) {
    const made = new Date().toISOString();
    const entries = await Promise.all(
      pictures.map(async (picture, index) => ({ run: this.run, settings, index, made, ...(await small(picture)) })),
    );
    this.keep(bounded([...entries, ...(this.keeps ? this.load() : this.all)]));
  }

  remove(entry) {
    this.keep(this.all.filter((other) => other !== entry));
  }

  clear() {
    this.keep(this.all.filter(({ run }) => run !== this.run));
  }

  keep(entries) {
    try {
      localStorage.setItem(KEY, JSON.stringify(entries));
    } catch {
      this.keeps = false;
    }
    this.become(entries);
  }

  become(entries) {
    this.all = entries;
    this.dispatchEvent(new Event("change"));
  }
}

/** Entries as this page writes them; anything else that may be stored here is dropped. */
function wellFormed(text) {
  const parsed = parsedOr(text, []);
  const sound = (entry) => String(entry?.picture).startsWith("data:image/") && entry.settings instanceof Object;
  return Array.isArray(parsed) ? parsed.filter(sound) : [];
}

function parsedOr(text, fallback) {
  try {
    return JSON.parse(text) ?? fallback;
  } catch {
    return fallback;
  }
}

/** The newest entries that fit. */
function bounded(entries) {
  let room = ROOM;
  return entries.slice(0, MOST).filter(({ picture }) => (room -= picture.length) >= 0);
}

async function small(picture) {
  if (picture.length <= SMALL) return { picture, whole: true };
  const image = new Image();
  image.src = picture;
  await image.decode();
  const scale = SIDE / Math.max(image.width, image.height);
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.round(scale * image.width), Math.round(scale * image.height)];
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return { picture: canvas.toDataURL("image/webp", 0.85), whole: false };
}
