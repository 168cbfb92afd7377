// A conversation, streamed; the source of each token is in the server's field `peagle_drafts`.
// Other servers do not have it: there the acceptance length is read from /metrics.

import { Answer } from "./answer.js";
import { stream } from "./api.js";
import { $, drafting, el, percent, seconds, tint } from "./dom.js";
import { draftsOf } from "./drafts.js";
import { acceptanceLength, snapshot } from "./metrics.js";

const EXAMPLES = [
  "Write a Python function that reverses a list.",
  "Explain in three sentences why the sky is blue.",
  "List the days of the week as JSON.",
];

const CUT = { length: "cut at Max tokens", abort: "ended by the server" };

let model, native; // native: a peagle server, which reports drafted tokens
let messages = [];
let running = null; // AbortController of the answer that comes

export function startChat(name, isNative) {
  [model, native] = [name, isNative];
  for (const text of EXAMPLES) {
    const choose = () => { $("question").value = text; grow(); $("composer").requestSubmit(); };
    $("chat-examples").append(el("button", { type: "button", class: "chip", click: choose }, text));
  }
  $("composer").addEventListener("submit", submit);
  $("question").addEventListener("input", grow);
  $("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("composer").requestSubmit();
  });
  $("send").addEventListener("click", (event) => {
    if (!running) return;
    event.preventDefault(); // once it is Send again, this click would send what is in the field
    running.abort();
  });
  $("new-chat").addEventListener("click", reset);
  // Before, the browser would have sent the form by itself, and a number typed would have changed.
  $("asking").disabled = false;
}

function reset() {
  running?.abort();
  messages = [];
  $("log").replaceChildren($("log").firstElementChild);
  $("welcome").hidden = false;
  for (const id of ["al", "rate", "ttft", "tokens"]) $(id).textContent = "–";
  $("legend").hidden = true;
  $("question").focus();
}

async function submit(event) {
  event.preventDefault();
  if (running) return;
  const text = $("question").value.trim();
  if (!text) return;
  const talk = messages; // New chat begins another
  $("question").value = "";
  grow();
  $("welcome").hidden = true;
  const asked = { role: "user", content: text };
  const said = { role: "assistant", content: "" }; // without the thinking
  const question = addMessage("You", "user");
  question.append(text);
  const body = addMessage(model, "assistant");
  running = new AbortController();
  showSend("button", "Stop"); // of this type, so that no field's value or Enter has a part in it
  $("log").setAttribute("aria-busy", "true"); // read out once it is complete
  try {
    await answer([...talk, asked], said, body);
    talk.push(asked, said);
  } catch (error) {
    if (error.name !== "AbortError") body.append(el("p", { class: "error", role: "alert" }, error.message));
    if (said.content) talk.push(asked, said);
    else if (talk === messages) takeBack(text, question);
  }
  body.classList.remove("coming");
  $("log").removeAttribute("aria-busy");
  showSend("submit", "Send");
  running = null;
}

// A question without an answer can be asked again.
function takeBack(text, question) {
  question.after(el("p", { class: "note" }, "Not part of the conversation"));
  if ($("question").value) return;
  $("question").value = text;
  grow();
}

function showSend(type, label) {
  $("send").type = type;
  $("send").textContent = label;
}

function addMessage(who, role) {
  const body = el("div", { class: role === "user" ? "words" : "words coming" });
  $("log").append(el("article", { class: `message ${role}` }, el("h2", {}, who), body));
  $("log").scrollTop = $("log").scrollHeight;
  return body;
}

async function answer(conversation, said, body) {
  const { signal } = running;
  const meter = new Meter(native ? null : await snapshot(signal).catch(() => null));
  const options = { include_usage: true, ...(native ? { peagle_drafts: true } : { continuous_usage_stats: true }) };
  const asked = {
    model, messages: conversation, stream: true, stream_options: options,
    temperature: Number($("temperature").value), max_tokens: Number($("max-tokens").value),
  };
  const shown = new Answer(body);
  const trees = [];
  let soFar = "";
  let cut; // why, in words
  try {
    for await (const event of stream("v1/chat/completions", asked, signal)) {
      const choice = event.choices[0];
      const content = choice?.delta?.content ?? "";
      const drafts = choice?.peagle_drafts;
      const pieces = drafts?.pieces ?? [{ text: content, place: 0 }];
      for (const tree of drafts?.trees ?? []) trees.push({ ...tree, soFar });
      said.content += content;
      const text = pieces.map((piece) => piece.text).join("");
      soFar += text;
      follow(() => shown.append(pieces));
      cut = CUT[choice?.finish_reason] ?? cut;
      meter.observe(text, drafts, event.usage);
    }
  } finally {
    follow(() => shown.end());
  }
  await meter.end(signal);
  const words = [meter.drafts && drafting(meter.drafts), cut].filter(Boolean);
  if (words.length) {
    const figures = el("p", { class: "figures" }, words.join(" · "));
    follow(() => body.after(figures, trees.length ? draftsOf(trees) : ""));
  }
}

// A change of the log; its end stays in sight where it was.
function follow(change) {
  const near = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 80;
  change();
  if (near) $("log").scrollTop = $("log").scrollHeight;
}

// What the aside shows of one answer.
class Meter {
  constructor(before) {
    this.before = before; // of /metrics, where the stream does not report drafted tokens
    this.started = performance.now();
    this.first = this.last = null;
    this.tokens = this.head = 0; // head: tokens that came with the first text
    this.places = []; // pieces of text by place in the draft
    this.total = this.found = 0; // pieces, those from lookup
    this.drafts = null; // the latest
    for (const id of ["al", "rate", "ttft", "tokens"]) $(id).textContent = "–";
    $("legend").hidden = true;
  }

  observe(text, drafts, usage) {
    this.tokens = drafts?.tokens ?? usage?.completion_tokens ?? this.tokens + (text ? 1 : 0);
    if (text) this.last = performance.now();
    if (text && this.first === null) {
      [this.first, this.head] = [this.last, this.tokens];
      $("ttft").textContent = seconds((this.first - this.started) / 1000);
    }
    for (const { text, place, source } of drafts?.pieces ?? []) {
      if (!text) continue;
      this.places[place] = (this.places[place] ?? 0) + 1;
      this.total += 1;
      this.found += source === "lookup";
    }
    this.drafts = drafts ?? this.drafts;
    if (drafts?.rounds) $("al").textContent = (1 + drafts.accepted / drafts.rounds).toFixed(2);
    if (drafts) this.legend();
    $("tokens").textContent = this.tokens;
    const spent = (this.last - this.first) / 1000;
    if (spent > 0) $("rate").textContent = ((this.tokens - this.head) / spent).toFixed(1);
  }

  legend() {
    const row = (swatch, name, count) => el("li", {}, el("span", { class: `swatch ${swatch}` }),
      el("span", {}, name), el("span", { class: "share" }, percent((count ?? 0) / this.total)));
    const rows = Array.from(this.places, (count, place) =>
      place ? row(tint(place), `Draft token ${place}`, count) : row("", "The model itself", count));
    if (this.found) rows.push(row("lookup", "From lookup", this.found));
    $("legend").hidden = !this.total;
    $("legend-rows").replaceChildren(...rows);
  }

  async end(signal) {
    if (!this.before) return;
    const length = acceptanceLength(this.before, await snapshot(signal));
    if (length !== undefined) $("al").textContent = length.toFixed(2);
  }
}

function grow() {
  const area = $("question");
  area.rows = Math.min(6, area.value.split("\n").length);
}
