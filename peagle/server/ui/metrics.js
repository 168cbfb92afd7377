// /metrics, in the text format of Prometheus, by the names of vLLM.

import { ask } from "./api.js";

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const SPEC = "vllm:spec_decode_num_";

export async function snapshot(signal) {
  const text = await (await ask("metrics", null, signal)).text();
  const sums = new Map();
  const positions = [];
  for (const line of text.split("\n")) {
    const found = LINE.exec(line);
    if (!found) continue;
    const [, name, labels, value] = found;
    sums.set(name, (sums.get(name) ?? 0) + Number(value));
    const position = /position="(\d+)"/.exec(labels ?? "");
    if (position && name === `${SPEC}accepted_tokens_per_pos_total`) {
      positions[position[1]] = (positions[position[1]] ?? 0) + Number(value);
    }
  }
  const sum = (name) => sums.get(name) ?? 0;
  const [rounds, accepted] = [sum(`${SPEC}drafts_total`), sum(`${SPEC}accepted_tokens_total`)];
  // vLLM does not have our names, and drafts in every round.
  const own = (name, otherwise) => sums.get(`peagle:decode_${name}_total`) ?? otherwise;
  return {
    at: performance.now() / 1000,
    generated: sum("vllm:generation_tokens_total"),
    running: sum("vllm:num_requests_running"),
    waiting: sum("vllm:num_requests_waiting"),
    rounds,
    accepted,
    positions,
    forwards: own("forwards", rounds),
    rows: own("rows", rounds + sum(`${SPEC}draft_tokens_total`)),
    decoded: own("tokens", rounds + accepted),
  };
}

// Acceptance length between two snapshots; undefined where nothing was drafted.
export function acceptanceLength(before, after) {
  const rounds = after.rounds - before.rounds;
  return rounds > 0 ? 1 + (after.accepted - before.accepted) / rounds : undefined;
}
