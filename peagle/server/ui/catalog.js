// Models known by name, and the command that serves one on this machine.

import { askJson, stream } from "./api.js";
import { $, METHODS, el } from "./dom.js";

export async function startCatalog(deploys) {
  const rows = await askJson("peagle/catalog");
  $("entries").replaceChildren(...rows.map((row) => entry(row, deploys)));
}

function entry(row, deploys) {
  const target = typeof row.target === "string" ? row.target : row.target.member;
  const facts = [
    row.verified && "run by this project", row.licence, row.hardware,
    row.min_vllm && `vLLM ${row.min_vllm} or later`, row.gpus > 1 && `${row.gpus} GPUs`,
  ].filter(Boolean);
  const heads = Object.entries(row.heads).map(([method, head]) => {
    const lengths = head.acceptance.filter(({ k }) => k === head.k).slice(0, 3).map(({ dataset, length, source }) =>
      el("span", { class: "badge", title: source }, `${dataset} ${length.toFixed(2)} `, el("small", {}, source.split(":")[0])));
    return el("li", {}, el("strong", {}, METHODS[method]), ` K = ${head.k} `,
      el("span", { class: "where" }, head.hub ?? head.folder), el("span", { class: "badges" }, ...lengths));
  });
  return el("article", { class: "card entry", "data-name": row.name },
    el("h3", {}, row.name), el("p", { class: "where" }, target),
    el("ul", { class: "facts" }, ...facts.map((fact) => el("li", {}, fact))),
    heads.length ? el("ul", { class: "heads" }, ...heads) : el("p", {}, "No public head is known: train one with peagle train."),
    row.note ? el("p", { class: "note" }, row.note) : "",
    ...deployment(row, deploys));
}

// The first click shows the command, the second runs it.
function deployment({ name, command }, deploys) {
  const output = el("pre", { class: "output", role: "log", "aria-label": `Output of deploying ${name}`, tabindex: 0, hidden: "" });
  const run = el("button", { type: "button", class: "main-action" }, "Run it on this machine");
  const hint = el("p", { class: "note" }, "Run it in a terminal of the machine. From here it runs only where this server has an API key, or is opened on its own machine.");
  const shown = el("div", { class: "command", hidden: "" }, el("code", {}, command), deploys ? run : hint);
  const show = el("button", { type: "button", class: "quiet", "aria-expanded": "false" }, "Deploy here");
  show.addEventListener("click", () => {
    shown.hidden = !shown.hidden;
    show.setAttribute("aria-expanded", String(!shown.hidden));
  });
  run.addEventListener("click", async () => {
    run.disabled = true;
    output.hidden = false;
    output.textContent = `$ ${command}\n`;
    const began = performance.now();
    const timer = setInterval(() => { run.textContent = `Running, ${Math.round((performance.now() - began) / 1000)} s`; }, 500);
    try {
      for await (const { line, exit_code: code } of stream("peagle/deploy", { name })) {
        output.append(line ?? (code ? `failed with code ${code}` : "done"), "\n");
      }
    } catch (error) {
      output.append(error.message, "\n");
    }
    clearInterval(timer);
    run.textContent = "Run it on this machine";
    run.disabled = false;
  });
  return [show, shown, output];
}
