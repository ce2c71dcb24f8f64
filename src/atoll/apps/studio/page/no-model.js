// What a view shows while no model can be used, and the logo of the run.

import { element, svgElement } from "./dom.js";
import { drawLogo } from "./logo.js";

export const RELOAD_MILLISECONDS = 2000; // while no model is loaded; the server scans for models as often

/** Return the logo of the run around an image of noise. */
export function largeLogo(run) {
  const ring = svgElement("svg", { viewBox: "0 0 40 40" });
  drawLogo(ring, run);
  return element("div", { class: "large-logo", "aria-hidden": "true" }, element("div", {}), ring);
}

/** Return why no model can be used: one is being loaded or could not be, or none is trained. */
function noModelReason({ loading, load_errors: errors, missing }) {
  const [failed] = Object.entries(errors);
  // The server tries again to load a model that failed; its error stays visible meanwhile.
  if (loading && !(loading.model in errors)) {
    const { model, networks, position, total } = loading;
    const size = networks > 1 ? ` (${networks} networks)` : "";
    return ["The models are being loaded.", `Loading model ${position} of ${total}: ${model}${size}.`];
  }
  if (failed) return [`The model ${failed[0]} could not be loaded.`, failed[1]];
  if (missing.length) return ["No expert is trained yet.", `Missing: ${missing.join(", ")}.`];
  return ["The models are being loaded.", ""];
}

export function noModel(run) {
  const [message, detail] = noModelReason(run);
  const islands = element("a", { href: "#islands" }, "Show training");
  return element(
    "div",
    { class: "welcome" },
    largeLogo(run),
    element("p", { class: "lead" }, message),
    detail && element("p", {}, detail),
    element("p", {}, "This page updates itself. ", islands),
  );
}
