// The server, as the page uses it: JSON, streams, and what it says of itself.

let key = "";

export const setKey = (value) => { key = value; };

const headers = (more = {}) => ({ "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }), ...more });

const LONGEST_MS = 8000;

// Errors have the server's own words. `status` 0: there was no answer; -1: none in time.
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function checked(response) {
  if (response.ok) return response;
  const text = await response.text();
  let message = text.slice(0, 1000) || response.statusText;
  try { message = JSON.parse(text).error.message; } catch { /* no error body of ours */ }
  throw new ServerError(message, response.status);
}

async function reached(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name !== "TypeError") throw error;
    throw new ServerError("the server does not answer", 0);
  }
}

// `admit`: of an answer that came, whether it is taken.
export async function get(path, admit = checked) {
  try {
    return await (await admit(await reached(path, { headers: headers(), signal: AbortSignal.timeout(LONGEST_MS) }))).json();
  } catch (error) {
    if (error.name === "TimeoutError") throw new ServerError(`the server has not answered for ${LONGEST_MS / 1000} s`, -1);
    if (error.name === "TypeError") throw new ServerError("the server is gone in the middle of its answer", 0);
    throw error;
  }
}

// What it says of its health, which of one that is not well is an error.
export const health = () => get("health", (response) => response);

export async function order(path, body, adminKey) {
  const options = { method: "POST", headers: headers({ authorization: `Bearer ${adminKey}` }), body: JSON.stringify(body) };
  return (await checked(await reached(path, options))).json();
}

// The events of a streamed answer, as they come.
export async function* stream(path, body, signal) {
  const response = await checked(await reached(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal }));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("the server is gone in the middle of its answer", 0);
    }
    if (part.done) break;
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (!line.startsWith("data: ")) continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new ServerError(event.error.message, 200);
      yield event;
    }
  }
  throw new ServerError("the answer ended before its end mark", 0);
}
