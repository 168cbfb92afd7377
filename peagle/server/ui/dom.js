// The page is built of elements and text nodes: no text is ever read as markup.

export const $ = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export const TINTS = 7; // places with a tint of their own

export const tint = (place) => `p${Math.min(place, TINTS)}`;

export const METHODS = { none: "Target alone", eagle3: "EAGLE-3", "p-eagle": "P-EAGLE", lookup: "Lookup" };

export const percent = (share) => `${Math.round(100 * share)} %`;

// How drafting fared in an answer, in words, by the server's counts.
export function drafting({ tokens, rounds, drafted, accepted, forwards, accepted_from_lookup: found }) {
  if (!rounds) return "nothing was drafted";
  const words = [
    `acceptance length ${(1 + accepted / rounds).toFixed(2)}`, `${(drafted / rounds).toFixed(1)} nodes a round`,
    `${((tokens - 1) / forwards).toFixed(2)} tokens a target forward`, // the first token is the prompt's
  ];
  if (found) words.push(`${percent(found / tokens)} from lookup`);
  return words.join(" · ");
}

export const seconds = (value) => (value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`);
