// How numbers, times and names are said.

const whole = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const count = (number) => whole.format(number);
export const compact = (number) => short.format(number);
export const percent = (share) => (share > 0 && share < 0.01 ? "<\u00a01\u202f%" : `${Math.round(100 * share)}\u202f%`);
export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

/** A time span, as exact as anybody wants to know it. */
export function span(seconds) {
  if (seconds < 10) return `${Number(seconds.toFixed(1))} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

/** What a routing does, in a sentence. */
export function routing(name) {
  const [rule, number] = name.split("-");
  const meanings = {
    top: number === "1" ? "the most probable expert at every step" : `the ${number} most probable experts, weighted`,
    full: "all experts, weighted by their probabilities",
    threshold: `every expert of probability ${number} or more`,
    nucleus: `the fewest experts that reach ${number} together`,
    drawn: "one expert for the whole picture, drawn by its probability",
    sample: "one expert, drawn by its probability at every step",
    nearest: "no router: the clusters' own densities decide",
  };
  return /[@:,]|equal/.test(name) ? "" : (meanings[rule] ?? "");
}

/** Who paints under these settings. */
export function painter(settings) {
  if (settings.expert !== undefined) return `expert ${settings.expert} alone`;
  return settings.model === "experts" ? settings.routing : settings.model;
}

/** What was asked for. */
export function subject(settings) {
  return settings.prompt || settings.label || "whatever comes";
}

/** What a picture's file is called, before its number. */
export function fileName(settings) {
  return `${subject(settings).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60)}-${settings.seed}`;
}

/** Everything besides the prompt, in one line. */
export function recipe(settings) {
  const { steps, guidance, seed } = settings;
  const parts = [painter(settings), plural(steps, "step"), `guidance ${guidance}`, `seed ${seed}`];
  return parts.map((part) => part.replaceAll(" ", "\u00a0")).join(" · ");
}
