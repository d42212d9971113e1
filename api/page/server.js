// HTTP client of the page: JSON requests, streams, health and commands.

let key = "";

export const setKey = (value) => { key = value; };

const headers = (more = {}) => ({ "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }), ...more });

const LONGEST_MS = 8000;

// Error with the server's message. `status` is 0 if the server cannot be reached and -1 after a timeout.
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
  try { message = JSON.parse(text).error.message; } catch { /* not an error body of this server */ }
  throw new ServerError(message, response.status);
}

async function reached(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name !== "TypeError") throw error;
    throw new ServerError("cannot reach the server: it is stopped or its address changed", 0);
  }
}

// `admit` checks the response and throws `ServerError` for one to reject.
export async function get(path, admit = checked) {
  try {
    return await (await admit(await reached(path, { headers: headers(), signal: AbortSignal.timeout(LONGEST_MS) }))).json();
  } catch (error) {
    if (error.name === "TimeoutError") throw new ServerError(`no response from the server within ${LONGEST_MS / 1000} s`, -1);
    if (error.name === "TypeError") throw new ServerError("connection to the server was lost during the response", 0);
    throw error;
  }
}

// Health of the server. An unhealthy one replies with an error status, which is not an error here.
export const health = () => get("health", (response) => response);

export async function command(path, body, adminKey) {
  const options = { method: "POST", headers: headers({ authorization: `Bearer ${adminKey}` }), body: JSON.stringify(body) };
  return (await checked(await reached(path, options))).json();
}

// Yields the events of a streamed response.
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
      throw new ServerError("connection to the server was lost during the response", 0);
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
  throw new ServerError("the response ended before [DONE]", 0);
}
