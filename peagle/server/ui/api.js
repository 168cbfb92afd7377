// The server's own API. With an API key set, the first answer is 401 and the page asks for the key.

import { $ } from "./dom.js";

const STORED = "peagle-api-key";
let known = sessionStorage.getItem(STORED);
let asking = null;

export async function ask(path, body, signal) {
  for (;;) {
    const key = known;
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    if (body) headers["content-type"] = "application/json";
    const response = await fetch(path, {
      method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body), cache: "no-store",
    });
    if (response.status === 401) {
      if (known === key) await newKey(key !== null);
      continue;
    }
    if (key) sessionStorage.setItem(STORED, key); // the server takes it
    if (!response.ok) throw new Error(await why(response));
    return response;
  }
}

export const askJson = async (path) => (await ask(path)).json();

// Server-sent events of a POST, as objects, until [DONE].
export async function* stream(path, body, signal) {
  const response = await ask(path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("The connection ended before the answer did");
      const lines = (held + value).split("\n");
      held = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new Error(event.error.message);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // left early, the server hears of it
  }
}

async function why(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

// One dialog, however many requests wait for the key.
function newKey(refused) {
  asking ??= new Promise((resolve) => {
    $("key-error").hidden = !refused;
    $("key").value = "";
    $("key-form").onsubmit = (event) => {
      event.preventDefault();
      known = $("key").value;
      asking = null;
      $("key-dialog").close();
      resolve();
    };
    $("key-dialog").oncancel = (event) => event.preventDefault(); // nothing works without it
    $("key-dialog").onclose = () => {
      if (asking && !$("key-dialog").open) $("key-dialog").showModal(); // a second Escape is not cancelled
    };
    $("key-dialog").showModal();
  });
  return asking;
}
