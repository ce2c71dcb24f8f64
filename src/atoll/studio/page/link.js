// Settings in the address: #paint?prompt=red+apple&routing=top-2&seed=7

const NUMBERS = ["n", "steps", "guidance", "seed", "expert", "seeds"];
const LISTS = ["painters"];

/** The address of a view with its settings. */
export function hashOf(view, settings = {}) {
  const said = Object.entries(settings).filter(([, value]) => value !== undefined && value !== "");
  const query = new URLSearchParams(said.map(([name, value]) => [name, [value].flat().join(" ")]));
  return said.length ? `#${view}?${query}` : `#${view}`;
}

/** The view that an address names, and its settings; what is no number is left to the defaults. */
export function readHash(hash) {
  const [view, query = ""] = hash.replace(/^#/, "").split(/\?(.*)/s);
  const settings = Object.fromEntries(new URLSearchParams(query));
  for (const name of NUMBERS) {
    if (!(name in settings)) continue;
    const number = settings[name].trim() === "" ? NaN : Number(settings[name]);
    if (Number.isFinite(number)) settings[name] = number;
    else delete settings[name];
  }
  for (const name of LISTS) if (name in settings) settings[name] = settings[name].split(" ");
  return { view, settings };
}

/** A link that anybody with access to this server can open. */
export function linkTo(view, settings) {
  return new URL(hashOf(view, settings), location.href).href;
}

/** Put a link on the clipboard, or where that is not allowed into a prompt to copy it from. */
export async function copy(link) {
  try {
    await navigator.clipboard.writeText(link);
    return true;
  } catch {
    window.prompt("Copy this link", link);
    return false;
  }
}
