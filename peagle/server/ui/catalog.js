// Models known by name, and how to deploy them.

import { askJson } from "./api.js";
import { $, METHODS, el } from "./dom.js";

export async function startCatalog() {
  const rows = await askJson("peagle/catalog");
  $("entries").replaceChildren(...rows.map(entry));
}

function entry(row) {
  const target = typeof row.target === "string" ? row.target : row.target.member;
  const facts = [
    row.verified && "run by this project", row.licence, row.hardware,
    row.min_vllm && `vLLM ${row.min_vllm} or later`, row.gpu_memory && `${row.gpu_memory} GiB of GPU memory`,
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
    deployment(row));
}

// What deploying does at each place, and the command for it.
function deployment({ command, target }) {
  const packaged = typeof target !== "string"; // only peagle's own engine reads it
  const image = packaged ? "your image of peagle (--image)" : "an image of vLLM";
  const plans = {
    local: "This machine: prints the line of peagle serve; --yes runs it in the terminal.",
    kubernetes: `Kubernetes: prints a deployment of ${image}, for helm or kubectl; --yes hands it over. --gpu names the type of GPU.`,
    sagemaker: `SageMaker: one stack with ${image}, its endpoint and its rights. Takes --region, and asks first; --dry-run prints the template.`,
  };
  const rows = Object.entries(plans).map(([place, plan]) =>
    el("li", {}, el("p", { class: "note" }, plan), ...copied(`${command} --to ${place}`)));
  return el("details", {}, el("summary", {}, "Deploy"), el("ul", { class: "plans" }, ...rows));
}

// Where a browser lends no clipboard (http to another machine) the command is selected.
function copied(command) {
  const shown = el("code", {}, command);
  const button = el("button", { type: "button", class: "quiet", click: async () => {
    getSelection().selectAllChildren(shown);
    try {
      await navigator.clipboard.writeText(command);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Selected";
    }
  } }, "Copy");
  return [shown, button];
}
