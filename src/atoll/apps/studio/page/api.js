// Client of the HTTP API: JSON, image files, and streams of server-sent events.

const TOKEN_KEY = "atoll.token";
const UNREACHABLE = "The server does not respond. Is atoll serve still running?";
const FINAL_EVENTS = ["done", "cancelled", "failed"]; // no event follows these
const CONNECTION_LOST = "The connection was lost before the images were finished.";

/** An error response of the server. Status 0 means that there was no response. */
export class ApiError extends Error {
  constructor(message, status = 0, field = null, retryAfter = 0) {
    super(message);
    this.status = status;
    this.field = field;
    this.retryAfter = retryAfter;
  }
}

let token = storedToken();
let tokenDialog = null;

takeToken();
addEventListener("hashchange", takeToken); // the address with a token was opened in a tab that shows the page

/** Move the token from the address to the tab's storage, so that it is not in bookmarks, links and screenshots. */
function takeToken() {
  const value = location.hash.match(/^#token=([\x21-\x7e]+)$/)?.[1];
  if (!value) return;
  history.replaceState(null, "", location.pathname + location.search);
  const dialog = document.getElementById("token");
  dialog.querySelector("input").value = value;
  if (dialog.open) dialog.close(); // which stores the value
  else storeToken(value);
}

function storedToken() {
  try {
    return sessionStorage.getItem(TOKEN_KEY);
  } catch {
    return null; // the browser blocks storage: the token lives as long as the page
  }
}

function storeToken(value) {
  token = value;
  try {
    sessionStorage.setItem(TOKEN_KEY, value);
  } catch {
    // as above
  }
}

/** Show the dialog for the token; requests that need it at the same time share one dialog. */
function requestToken(problem) {
  tokenDialog ??= new Promise((resolve) => {
    const dialog = document.getElementById("token");
    const field = dialog.querySelector("input");
    dialog.querySelector(".problem").textContent = problem;
    // The whole address may be pasted. Headers cannot contain other characters, and no token does.
    const save = () => storeToken(field.value.replace(/^.*#token=/, "").replace(/[^\x20-\x7e]/g, "?"));
    dialog.addEventListener("close", () => resolve(save()), { once: true });
    field.value = "";
    dialog.showModal();
  }).finally(() => (tokenDialog = null));
  return tokenDialog;
}

/** Return a successful response; throw ApiError otherwise. */
async function send(path, options = {}) {
  const sent = token;
  const headers = { ...options.headers, ...(sent ? { Authorization: `Bearer ${sent}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError(UNREACHABLE);
  }
  if (response.status === 401) {
    // If the token changed meanwhile, another request has shown the dialog already: only retry.
    if (token === sent) await requestToken(sent ? "This token is wrong." : "");
    return send(path, options);
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  const body = await response.json().catch(() => ({}));
  const message = body.error?.message ?? `The server returned ${response.status} ${response.statusText}.`;
  const retryAfter = Number(response.headers.get("Retry-After")) || 1;
  return new ApiError(message, response.status, body.error?.param ?? null, retryAfter);
}

/** Return the JSON at a path. */
export async function getJson(path) {
  return (await send(path)).json();
}

/** Return an object URL of an image file. An <img> element cannot send the token itself. Free it with URL.revokeObjectURL. */
export async function imageUrl(path) {
  return URL.createObjectURL(await (await send(path)).blob());
}

/** Yield the events of a generation request. While the queue is full, wait, with an event `busy` before every retry. */
export async function* generate(request, signal) {
  for (;;) {
    try {
      return yield* stream("/v1/images", request, signal);
    } catch (error) {
      if (error.status !== 429) throw error;
      yield { event: "busy", data: { seconds: error.retryAfter } };
      await pause(1000 * error.retryAfter, signal);
    }
  }
}

// EventSource cannot send a body or a token, so the stream is parsed here.
async function* stream(path, request, signal) {
  const body = JSON.stringify({ ...request, stream: true });
  const response = await send(path, { method: "POST", body, signal, headers: { "Content-Type": "application/json" } });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read().catch(() => ({ done: true }));
    if (done) throw new ApiError(CONNECTION_LOST);
    const blocks = (text + value).split(/\r?\n\r?\n/);
    text = blocks.pop(); // the last block may be incomplete
    for (const block of blocks) {
      const parsed = parse(block);
      if (parsed) yield parsed;
      if (FINAL_EVENTS.includes(parsed?.event)) return;
    }
  }
}

/** Parse one block of an event stream; null for comments, which only keep the connection open. */
function parse(block) {
  const lines = block.split(/\r?\n/).map((line) => line.split(/: ?(.*)/s));
  const data = lines.filter(([name]) => name === "data").map(([, value]) => value);
  const event = lines.find(([name]) => name === "event")?.[1] ?? "message";
  return data.length ? { event, data: JSON.parse(data.join("\n")) } : null;
}

/** Wait; reject at once when the signal aborts. */
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
