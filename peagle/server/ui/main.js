// Tabs, and what the server is.

import { askJson } from "./api.js";
import { startCatalog } from "./catalog.js";
import { startCharts } from "./charts.js";
import { startChat } from "./chat.js";
import { $, METHODS, el } from "./dom.js";
import { startRace } from "./race.js";

const tabs = [...document.querySelectorAll("[role=tab]")];

function show(name) {
  const chosen = tabs.find((tab) => tab.getAttribute("aria-controls") === name) ?? tabs[0];
  for (const tab of tabs) {
    const selected = tab === chosen;
    tab.setAttribute("aria-selected", String(selected));
    tab.tabIndex = selected ? 0 : -1;
    $(tab.getAttribute("aria-controls")).hidden = !selected;
  }
}

for (const [at, tab] of tabs.entries()) {
  tab.addEventListener("click", () => {
    const name = tab.getAttribute("aria-controls");
    history.replaceState(null, "", `#${name}`); // to go there would take the focus away
    show(name);
  });
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(at + step + tabs.length) % tabs.length];
    next.focus();
    next.click();
  });
}
addEventListener("hashchange", () => show(location.hash.slice(1)));
show(location.hash.slice(1));

const drafting = ({ method, drafts }) => (method === "none" ? "no head" : `${METHODS[method]}, ${drafts}`);

const unavailable = (what) => el("p", { class: "notice" }, `${what} is part of peagle's own engine; this server is another one.`);

try {
  const [{ id, owned_by: owner, max_model_len: context }] = (await askJson("v1/models")).data;
  const own = owner === "peagle";
  for (const node of document.querySelectorAll(".model-name")) node.textContent = id;
  document.title = `${id} · peagle`;
  let served = id;
  if (own) {
    const about = await askJson("peagle/console");
    served = `${id} · ${drafting(about)}`;
    // An answer has room after the prompt only, and the server refuses to promise more.
    const longest = $("max-tokens");
    longest.max = context;
    longest.value = Math.min(longest.value, Math.floor(context / 2));
    if (about.method === "none") $("welcome-about").textContent = "There is no head: the model answers without drafts.";
    startRace(about.lanes);
    startCatalog().catch((error) => $("entries").append(el("p", { class: "error" }, error.message)));
  } else {
    $("welcome-about").textContent = "This server does not report drafted tokens, so none is tinted.";
    $("race-form").replaceWith(unavailable("The race"));
    $("entries").append(unavailable("The catalog"));
  }
  startChat(id, own);
  startCharts((answers) => {
    $("dot").classList.toggle("on", answers);
    const state = answers ? served : `${id} · not reachable`;
    if ($("served").textContent !== state) $("served").textContent = $("served").title = state;
  });
} catch (error) {
  $("served").textContent = "not reachable";
  $("welcome-about").textContent = `The server does not answer: ${error.message}. Reload this page to try again.`;
}
