// The server's answers: JSON, pictures, and streams of events.

const TOKEN = "atoll.token";
const MISSED = "The server does not answer. Is atoll serve still running?";
const LAST = ["done", "cancelled", "failed"]; // nothing follows these events
const LOST = "The connection was lost before the picture was done.";

/** What the server refused, and why. Status 0 is no answer at all. */
export class Refused extends Error {
  constructor(message, status = 0, field = null, wait = 0) {
    super(message);
    this.status = status;
    this.field = field;
    this.wait = wait;
  }
}

let token = remembered();
let asking = null;

function remembered() {
  try {
    return sessionStorage.getItem(TOKEN);
  } catch {
    return null; // storage is refused: the token lives as long as the page
  }
}

function remember(value) {
  token = value;
  try {
    sessionStorage.setItem(TOKEN, value);
  } catch {
    // as above
  }
}

/** Ask for the token; requests that wait for it share one dialog. */
function askForToken(problem) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("token");
    const field = dialog.querySelector("input");
    dialog.querySelector(".problem").textContent = problem;
    // Other characters cannot be sent, and no token has them.
    const given = () => remember(field.value.replace(/[^\x20-\x7e]/g, "?"));
    dialog.addEventListener("close", () => resolve(given()), { once: true });
    field.value = "";
    dialog.showModal();
  }).finally(() => (asking = null));
  return asking;
}

/** An answer of the server that is not an error. */
async function ask(path, options = {}) {
  const sent = token;
  const headers = { ...options.headers, ...(sent ? { Authorization: `Bearer ${sent}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Refused(MISSED);
  }
  if (response.status === 401) {
    if (token === sent) await askForToken(sent ? "The server does not know this token." : "");
    return ask(path, options);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const said = await response.json().catch(() => ({}));
  const message = said.error?.message ?? `The server answered ${response.status} ${response.statusText}.`;
  const wait = Number(response.headers.get("Retry-After")) || 1;
  return new Refused(message, response.status, said.error?.field ?? null, wait);
}

/** What is at this path. */
export async function read(path) {
  return (await ask(path)).json();
}

/** The address of a picture that may need the token: <img> sends none. Free it with URL.revokeObjectURL. */
export async function pictureAt(path) {
  return URL.createObjectURL(await (await ask(path)).blob());
}

/** The events of a painting, as the server sends them; while the queue is full, an event `busy` before every wait. */
export async function* paint(request, signal) {
  for (;;) {
    try {
      return yield* stream("/v1/images", request, signal);
    } catch (error) {
      if (error.status !== 429) throw error;
      yield { event: "busy", data: { seconds: error.wait } };
      await pause(1000 * error.wait, signal);
    }
  }
}

async function* stream(path, request, signal) {
  const body = JSON.stringify({ ...request, stream: true });
  const response = await ask(path, { method: "POST", body, signal, headers: { "Content-Type": "application/json" } });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read().catch(() => ({ done: true }));
    if (done) throw new Refused(LOST);
    const blocks = (text + value).split(/\r?\n\r?\n/);
    text = blocks.pop();
    for (const block of blocks) {
      const parsed = parse(block);
      if (parsed) yield parsed;
      if (LAST.includes(parsed?.event)) return;
    }
  }
}

/** One block of an event stream; null for comments, which keep the connection open. */
function parse(block) {
  const lines = block.split(/\r?\n/).map((line) => line.split(/: ?(.*)/s));
  const data = lines.filter(([name]) => name === "data").map(([, value]) => value);
  const event = lines.find(([name]) => name === "event")?.[1] ?? "message";
  return data.length ? { event, data: JSON.parse(data.join("\n")) } : null;
}

function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const stop = () => {
      clearTimeout(timer);
      reject(new DOMException("cancelled", "AbortError"));
    };
    const timer = setTimeout(() => {
      signal.removeEventListener("abort", stop);
      resolve();
    }, milliseconds);
    signal.addEventListener("abort", stop, { once: true });
  });
}
