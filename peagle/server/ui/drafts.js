// The drafts of an answer, one at a time: what was offered, and what of it was accepted.

import { el, percent, tint } from "./dom.js";

const SO_FAR = 60; // characters of the answer before a draft

const SIGNS = { " ": "·", "\n": "↵", "\t": "⇥" };

const visible = (text) => text.replace(/[ \n\t]/g, (space) => SIGNS[space]) || "∅";

// `trees`: of the server, each with the text `soFar` before it.
export function draftsOf(trees) {
  const slider = el("input", { type: "range", min: 1, max: trees.length, value: 1, "aria-label": "Draft", input: show });
  const number = el("output", {});
  const drawn = el("div", {});
  function show() {
    const tree = trees[slider.value - 1];
    const counts = `${tree.nodes.length} offered, ${tree.accepted.length} accepted`;
    number.textContent = `${slider.value} of ${trees.length}: ${counts}`;
    slider.setAttribute("aria-valuetext", number.textContent);
    drawn.replaceChildren(...draft(tree));
  }
  show();
  return el("details", { class: "drafts" }, el("summary", {}, "Drafts, round by round"),
    el("label", {}, slider, number), drawn);
}

function draft(tree) {
  const soFar = tree.soFar.length > SO_FAR ? `…${tree.soFar.slice(-SO_FAR)}` : tree.soFar;
  const label = "Draft tokens, the likeliest first; each follows the one before it";
  const parts = [
    el("p", { class: "note" }, "After ", el("code", {}, visible(soFar))),
    el("div", { class: "tree", tabindex: 0, role: "group", "aria-label": label },
      el("ul", {}, el("li", {}, node(tree.before, "start", "before the draft"), following(tree, 0, 1)))),
  ];
  if (tree.matched) parts.push(el("p", { class: "note" }, lookup(tree)));
  return parts;
}

function lookup({ matched, looked_up: rows, nodes, accepted }) {
  const found = rows.map((row) => visible(nodes[row - 1])).join(" ");
  const kept = rows.filter((row) => accepted.includes(row)).length;
  const offered = found ? `, then came ${found}: ${kept} of ${rows.length} accepted` : ", what followed was not offered";
  return `Lookup: the newest ${matched} tokens occurred before${offered}.`;
}

// The nodes after a node; after the last accepted one, the model's own token.
function following(tree, parent, depth) {
  const list = el("ul");
  for (const [at, text] of tree.nodes.entries()) {
    if (tree.parents[at] !== parent) continue;
    const row = at + 1;
    const accepted = tree.accepted.includes(row);
    const found = tree.looked_up.includes(row);
    const kind = `${accepted ? `accepted ${tint(depth)}` : "refused"}${found ? " lookup" : ""}`;
    const words = `${accepted ? "accepted" : "not accepted"}${found ? ", from lookup" : ""}, expected chance`;
    list.append(el("li", {}, node(text, kind, words, percent(tree.chances[at])), following(tree, row, depth + 1)));
  }
  if (parent === (tree.accepted.at(-1) ?? 0) && tree.after) {
    list.append(el("li", {}, node(tree.after, "own", "the model's own")));
  }
  return list.children.length ? list : "";
}

function node(text, kind, words, chance = "") {
  return el("span", { class: `node ${kind}`, title: `${words} ${chance}` }, visible(text),
    el("span", { class: "unseen" }, ` ${words}`), el("small", {}, ` ${chance}`));
}
