// HTTP: the served model, and one streamed chat turn. Knows the server's API and nothing of the page.

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// The root of the API is where the page was found, so that it also works behind a proxy's path.
async function send(path, key, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers });
  if (!response.ok) throw new ApiError(response.status, await reason(response));
  return response;
}

async function reason(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${response.statusText}: ${text.slice(0, 300)}`;
  }
}

export async function servedModel(key) {
  const body = await (await send("v1/models", key)).json();
  return body.data[0].id;
}

// Yields the chunks of one answer. A stream that ends without [DONE] was cut.
export async function* chat(body, { key, session, signal }) {
  const response = await send("v1/chat/completions", key, {
    method: "POST",
    headers: { "content-type": "application/json", "x-session-id": session },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(200, chunk.error.message);
    yield chunk;
  }
  throw new ApiError(200, "the stream broke off");
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const frames = (held + value).split("\n\n");
    held = frames.pop();
    for (const frame of frames) yield frame.replace(/^data: /, "");
  }
}
