// The target alone and with each head, on one prompt: measured one after the other, replayed together.

import { Answer } from "./answer.js";
import { stream } from "./api.js";
import { $, drafting, el, seconds } from "./dom.js";

let lanes = []; // as the server numbers them
let wanted = 1; // tokens
let running = null; // AbortController of the race
let replaying = 0; // requestAnimationFrame's number

const MAX_EXCESS = 1.1; // of a ratio over the tokens a target forward; more is not the drafter's

const racing = () => lanes.filter((lane) => !lane.missing);

export function startRace(offered) {
  line(offered);
  $("race-form").addEventListener("submit", submit);
  $("replay").addEventListener("click", replay);
  $("race-start").disabled = false; // before, the browser would have sent the form by itself
}

function line(offered) {
  lanes = offered.map((lane) => new Lane(lane));
  $("lanes").replaceChildren(...lanes.map((lane) => lane.node));
}

async function submit(event) {
  event.preventDefault();
  if (running) return running.abort();
  cancelAnimationFrame(replaying);
  running = new AbortController();
  $("race-start").textContent = "Stop";
  $("race-start").formNoValidate = true; // to stop needs no prompt
  $("replay").hidden = $("verdict").hidden = true;
  $("race-status").textContent = "Waiting for the engine";
  wanted = Number($("race-tokens").value);
  try {
    await measure();
    $("race-status").textContent = "";
    $("replay").hidden = false;
    if (!matchMedia("(prefers-reduced-motion: reduce)").matches) replay();
  } catch (error) {
    $("race-status").textContent = error.name === "AbortError" ? "Stopped" : error.message;
  }
  $("race-start").textContent = "Start the race";
  $("race-start").formNoValidate = false;
  running = null;
}

async function measure() {
  const messages = [{ role: "user", content: $("race-prompt").value }];
  let verdict = null;
  for await (const event of stream("peagle/race", { messages, max_tokens: wanted }, running.signal)) {
    if (event.lanes) {
      line(event.lanes);
    } else if (event.lane !== undefined) {
      const lane = lanes[event.lane];
      $("race-status").textContent = `Measuring ${lane.name}`;
      lane.record(event);
      if (event.ended) lane.finish(lanes[0]);
    } else {
      verdict = event;
    }
  }
  if (!verdict) throw new Error("The race was cut short");
  judge(verdict);
}

function judge({ identical, same_tokens: same }) {
  const ran = racing();
  const fastest = ran.reduce((best, lane) => (lane.speed > best.speed ? lane : best));
  for (const lane of ran) {
    lane.node.classList.toggle("fastest", lane === fastest && ran.length > 1);
    lane.bar.value = lane.speed / fastest.speed;
  }
  const verdict = $("verdict");
  verdict.hidden = ran.length < 2;
  verdict.dataset.identical = identical;
  verdict.textContent = identical
    ? `Identical: all ${same} token ids are the same in every lane.`
    : `Not identical: only the first ${same} token ids are the same in every lane.`;
}

function replay() {
  cancelAnimationFrame(replaying);
  const ran = racing();
  for (const lane of ran) lane.rewind();
  const longest = Math.max(...ran.map((lane) => lane.seconds));
  const began = performance.now();
  const frame = () => {
    const at = (performance.now() - began) / 1000;
    for (const lane of ran) lane.play(at);
    $("race-status").textContent = at < longest ? `Replay ${at.toFixed(1)} s` : "";
    if (at < longest) replaying = requestAnimationFrame(frame);
  };
  frame();
}

class Lane {
  constructor({ title, drafts, missing }) {
    this.name = title;
    this.missing = missing; // why it cannot run
    this.drafts = drafts; // what, in words; empty: nothing
    this.rounds = [];
    this.shown = 0;
    this.seconds = this.speed = 0; // once it has ended
    this.text = el("div", { class: "lane-text", tabindex: 0, role: "group", "aria-label": `Answer of ${this.name}` });
    this.answer = new Answer(this.text);
    this.rate = el("p", { class: "lane-rate" }, "–");
    this.facts = el("p", { class: "lane-facts" });
    this.progress = el("progress", { max: wanted, value: 0, "aria-label": `Tokens of ${this.name}` });
    this.bar = el("progress", { class: "speed", max: 1, value: 0, "aria-label": `Speed of ${this.name}` });
    const heading = el("h3", {}, title, missing ? "" : el("span", { class: "size" }, drafts || "no drafts"));
    const parts = missing ? [el("p", {}, "Not available"), el("p", { class: "note" }, missing)]
      : [this.rate, this.bar, this.facts, this.progress, this.text];
    this.node = el("article", { class: missing ? "card lane absent" : "card lane" }, heading, ...parts);
  }

  record(round) {
    this.rounds.push(round);
    this.show(this.rounds.length);
  }

  finish(base) {
    const last = this.rounds.at(-1);
    this.seconds = last.at;
    this.speed = last.tokens / last.at;
    this.answer.end();
    this.progress.max = this.progress.value = last.tokens;
    const times = this.speed / base.speed;
    const tokens = (last.tokens - 1) / last.forwards; // a target forward
    const busy = times > MAX_EXCESS * tokens; // no drafts are that good: something slowed the target alone
    const ratio = el("span", { class: "ratio" }, busy ? "machine busy: race again" : `${times.toFixed(2)} ×`);
    this.rate.replaceChildren(el("strong", {}, this.speed.toFixed(1)), " tok/s ", ratio);
    const first = this.rounds.find((round) => round.tokens).at;
    const waited = `first token ${seconds(first)} · ${seconds(this.seconds)} in all`;
    this.facts.replaceChildren(waited, ...(this.drafts ? [el("br"), drafting(last)] : []));
  }

  rewind() {
    this.shown = 0;
    this.text.replaceChildren();
    this.answer = new Answer(this.text);
    this.node.classList.remove("done");
  }

  play(at) {
    let end = this.shown;
    while (end < this.rounds.length && this.rounds[end].at <= at) end += 1;
    this.show(end);
    this.node.classList.toggle("done", end === this.rounds.length);
  }

  show(end) {
    if (end === this.shown) return;
    for (const round of this.rounds.slice(this.shown, end)) this.answer.append(round.pieces);
    if (this.seconds && end === this.rounds.length) this.answer.end();
    this.shown = end;
    this.progress.value = this.rounds[end - 1].tokens;
    this.text.scrollTop = this.text.scrollHeight;
  }
}
