// Format numbers, durations and settings as text.

const integer = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const count = (number) => integer.format(number);
export const compact = (number) => short.format(number);
export const percent = (share) => (share > 0 && share < 0.01 ? "<\u00a01\u202f%" : `${Math.round(100 * share)}\u202f%`);
export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

/** Return a duration with two or three significant digits. */
export function duration(seconds) {
  if (seconds < 10) return `${Number(seconds.toFixed(1))} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

/** Return what a routing does; empty for schedules of several rules. */
export function describeRouting(name) {
  const [rule, number] = name.split("-");
  const descriptions = {
    top: number === "1" ? "the most probable expert at every step" : `the ${number} most probable experts, weighted`,
    full: "all experts, weighted by their probabilities",
    threshold: `all experts with a probability of at least ${number}`,
    nucleus: `the fewest experts with a total probability of at least ${number}`,
    drawn: "one random expert for the whole image",
    once: "the most probable expert of the first step for the whole image",
    sample: "one random expert at every step",
    nearest: "by the densities of the clusters, without a router",
  };
  return /[@:,]/.test(name) ? "" : (descriptions[rule] ?? "");
}

/** Return the model of some settings: a routing, one expert, or a dense model. */
export function modelName(settings) {
  if (settings.expert !== undefined) return `expert ${settings.expert} only`;
  return settings.model === "experts" ? settings.routing : settings.model;
}

/** Return the prompt or the class of some settings. */
export function conditionText(settings) {
  return settings.prompt || settings.label || "No prompt";
}

/** Return the name of an image file, without its number. */
export function fileName(settings) {
  return `${conditionText(settings).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60)}-${settings.seed}`;
}

/** Return all settings but the prompt in one line. */
export function settingsText(settings) {
  const { steps, guidance_scale: scale, seed, width, height } = settings;
  const parts = [modelName(settings), plural(steps, "step"), `guidance scale ${scale}`, `seed ${seed}`];
  if (width && height) parts.push(`${width} × ${height}`);
  return parts.map((part) => part.replaceAll(" ", "\u00a0")).join(" · ");
}
