// Settings in the URL: #generate?prompt=red+apple&routing=top-2&seed=7

const NUMBERS = ["num_images", "steps", "guidance_scale", "seed", "expert", "seeds", "width", "height"];
const LISTS = ["variants"];

/** Return the hash of a view with its settings. */
export function hashOf(view, settings = {}) {
  const given = Object.entries(settings).filter(([, value]) => value !== undefined && value !== "");
  const query = new URLSearchParams(given.map(([name, value]) => [name, [value].flat().join(" ")]));
  return given.length ? `#${view}?${query}` : `#${view}`;
}

/** Return the view and the settings of a hash. Invalid numbers are dropped, so that the defaults apply. */
export function readHash(hash) {
  const [view, query = ""] = hash.replace(/^#/, "").split(/\?(.*)/s);
  const settings = Object.fromEntries(new URLSearchParams(query));
  for (const name of NUMBERS) {
    if (!(name in settings)) continue;
    // Number("") is 0, which nobody meant.
    const number = settings[name].trim() === "" ? NaN : Number(settings[name]);
    if (Number.isFinite(number)) settings[name] = number;
    else delete settings[name];
  }
  for (const name of LISTS) if (name in settings) settings[name] = settings[name].split(" ");
  return { view, settings };
}

/** Return a URL that anybody with access to this server can open. */
export function urlOf(view, settings) {
  return new URL(hashOf(view, settings), location.href).href;
}

/** Copy a link; show it in a prompt where the browser does not allow access to the clipboard. */
export async function copyLink(link) {
  try {
    await navigator.clipboard.writeText(link);
    return true;
  } catch {
    window.prompt("Copy this link", link);
    return false;
  }
}
