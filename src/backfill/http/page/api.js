// Requests to this server, with the API key of this tab.

const KEY = "backfill-api-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export class Refused extends Error {
  /** The server's answer was an error; `message` is its own. */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** What went wrong, for the user: a browser's own words for a lost connection say little. */
export const wordsOf = (error) =>
  error instanceof TypeError || error.name === "TimeoutError" ? "The connection to the server was lost." : error.message;

/** The response to a request. Throws Refused, or TypeError where no server answers. */
export async function request(path, options = {}) {
  const headers = new Headers(options.headers);
  const sent = key.get();
  if (sent) headers.set("Authorization", `Bearer ${sent}`);
  const response = await fetch(path, { cache: "no-store", ...options, headers });
  if (response.ok) return response;
  // An answer to an earlier key says nothing of this one.
  if (response.status === 401 && sent === key.get()) document.dispatchEvent(new Event("key-needed"));
  throw new Refused(response.status, await reason(response));
}

const PATIENCE_MS = 5000; // a connection may be lost without a word

/** An answer that is short and soon there, as text. Throws as `request` does, and TimeoutError. */
export const getText = async (path) => (await request(path, { signal: AbortSignal.timeout(PATIENCE_MS) })).text();

export const getJson = async (path) => JSON.parse(await getText(path));

export const postJson = (path, body, options = {}) =>
  request(path, {
    ...options,
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });

async function reason(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? body?.status ?? `HTTP ${response.status}`;
}
