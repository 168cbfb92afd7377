// Text of an answer as it comes: tinted where a draft wrote it, underlined where lookup found it, and
// in monospace what Markdown marks as code.

import { el, tint } from "./dom.js";

const OPENING = /^[ \t]*(`{3,}|~{3,})([^`\n]{0,80})\n?$/; // a fence, and the language
// Lines that may still become a fence.
const MAYBE_OPENING = /^[ \t]*(?:`*|~*|(?:`{3,}|~{3,})[^`\n]{0,80})$/;
const MAYBE_CLOSING = /^[ \t]*(?:`*|~*)\s*$/;

export class Answer {
  constructor(node) {
    this.node = node;
    this.code = null; // of the block that is open
    this.fence = ""; // which opened it
    this.startLine();
  }

  startLine() {
    this.line = "";
    this.held = []; // pieces of a line that may be a fence; null: the line is none
    this.run = null; // backticks in a row, which the next piece may continue
    this.runs = new Map(); // earlier ones of the line, by their text
  }

  append(pieces) {
    for (const piece of pieces) {
      for (const text of piece.text.split(/(?<=\n)/)) if (text) this.add({ ...piece, text });
    }
  }

  // What is held is decided on.
  end() {
    if (this.held?.length) this.settle();
    this.endRun();
    this.startLine();
  }

  add(piece) {
    const ended = piece.text.endsWith("\n");
    if (this.held) {
      this.line += piece.text;
      this.held.push(piece);
      if (ended) this.settle();
      else if (!(this.code ? MAYBE_CLOSING : MAYBE_OPENING).test(this.line)) this.release();
    } else {
      this.show(piece);
    }
    if (ended) this.startLine();
  }

  // The line is known: a fence is not shown.
  settle() {
    if (!(this.code ? this.closes() : this.opens())) this.release();
  }

  opens() {
    const found = OPENING.exec(this.line);
    if (!found) return false;
    this.fence = found[1];
    this.code = el("code");
    // A long line scrolls, by keyboard too.
    this.node.append(el("pre", { "data-language": found[2].trim() || undefined, tabindex: 0 }, this.code));
    return true;
  }

  closes() {
    const text = this.line.trim();
    if (text.length < this.fence.length || text !== this.fence[0].repeat(text.length)) return false;
    this.code = null;
    return true;
  }

  release() {
    const held = this.held;
    this.held = null;
    for (const piece of held) this.show(piece);
  }

  show(piece) {
    if (this.code) {
      this.code.append(shown(piece));
      return;
    }
    for (const text of piece.text.split(/(`+)/)) {
      if (!text) continue;
      const part = shown({ ...piece, text });
      if (text[0] === "`") {
        this.run ??= this.node.appendChild(el("span"));
        this.run.append(part);
      } else {
        this.endRun();
        this.node.append(part);
      }
    }
  }

  // Where a run of backticks has an equal one before it in the line, code is between them.
  endRun() {
    const { run } = this;
    if (!run) return;
    this.run = null;
    const opening = this.runs.get(run.textContent);
    if (!opening) {
      this.runs.set(run.textContent, run);
      return;
    }
    const code = el("code");
    while (opening.nextSibling !== run) code.append(opening.nextSibling);
    opening.replaceWith(code);
    run.remove();
    this.runs.clear();
  }
}

function shown({ text, place, source }) {
  if (!place) return document.createTextNode(text);
  const found = source === "lookup";
  const title = `draft token ${place}${found ? ", from lookup" : ""}`;
  return el("span", { class: `token ${tint(place)}${found ? " lookup" : ""}`, title }, text);
}
