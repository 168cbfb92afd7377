"""What the deterministic mode costs: the same prompts with and without it, interleaved.

    python benchmarks/deterministic.py [--concurrency 1,8]

bf16, greedy, HumanEval with the chat template; the target alone and with each head at its K in the
catalog.
"""

import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from common import (
    as_ids,
    catalog_k,
    environment,
    heads,
    human_eval,
    load,
    options,
    whole_numbers,
    write_json,
)

from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.model.drafter import Drafter

Modes = dict[bool, LLM]  # with the deterministic mode, and without


@dataclass
class Row:
    """One method at one concurrency: seconds of every repeat, by mode."""

    method: str
    drafter: Drafter | None
    k: int | None
    concurrency: int
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})

    def decode(self, llms: Modes, exact: bool, prompts: list[list[int]], max_tokens: int) -> None:
        llm = llms[exact].use(self.drafter, self.k, max_batch=self.concurrency)
        llm.generate(prompts[:1], SamplingParams(max_tokens=4))
        llm = llm.use(self.drafter, self.k)  # nothing in the cache
        llm.warm_up()
        started = time.perf_counter()
        llm.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        self.seconds[exact].append(time.perf_counter() - started)

    def report(self) -> dict[str, Any]:
        pairs = zip(self.seconds[True], self.seconds[False], strict=True)
        ratio = median(slow / fast for slow, fast in pairs)
        return {"method": self.method, "k": self.k or 0, "concurrency": self.concurrency,
                "times_as_long": round(ratio, 3)}  # fmt: skip


def main() -> None:
    parser = options(__doc__, "deterministic.json")
    parser.add_argument("--concurrency", type=whole_numbers, default=[1, 8])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    llm = load("bfloat16")
    llms = {False: llm, True: LLM(llm.target, deterministic=True)}
    best = catalog_k()
    drafters = {m: llm.load_head(folder) for m, folder in heads(args).items()}
    kinds = [("none", None, None), *((m, d, best[m]) for m, d in drafters.items())]
    rows = [Row(*kind, concurrency) for concurrency in args.concurrency for kind in kinds]
    prompts = as_ids(llm, human_eval(args.prompts))
    for repeat in range(args.repeats):
        for row in rows:
            for exact in (False, True) if repeat % 2 else (True, False):
                row.decode(llms, exact, prompts, args.max_tokens)
    for row in rows:
        found = row.report()
        print(f"c = {row.concurrency}  {row.method:8} {found['times_as_long']:.2f} × as long")
    settings = {"prompts": args.prompts, "max_tokens": args.max_tokens, "repeats": args.repeats}
    report = {**environment(), **settings, "rows": [row.report() for row in rows]}
    write_json(args.output, report)


if __name__ == "__main__":
    main()
