"""Where the time of a round goes: the models, choosing and growing a tree, lookup, budget, walking.

    python benchmarks/round_profile.py [--limit 8] [--max-tokens 128]

bf16, greedy, HumanEval, one request at a time; rounds that decode only. Calls of the engine's parts
are timed, each without the timed calls inside it, so that every second is counted once.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from common import (
    TARGET,
    as_ids,
    catalog_k,
    environment,
    fingerprint,
    heads,
    human_eval,
    load,
    options,
    write_json,
)

from peagle.backends.kv_cache import FeatureCache, KVCache
from peagle.engine import engine as engine_module
from peagle.engine.budget import Budget, Calibration
from peagle.engine.draft import Chooser, Proposer
from peagle.engine.engine import Engine
from peagle.engine.llm import LLM
from peagle.engine.lookup import LookupCalibration
from peagle.engine.params import SamplingParams
from peagle.engine.tree import Draft
from peagle.methods.eagle3 import Eagle3
from peagle.methods.p_eagle import PEagle

OURS = ("choose", "grow", "lookup", "budget", "walk")  # choosing and walking: aimed for, < 3 %
CALLS: list[tuple[Any, str, str]] = [
    (Engine, "step", "rest"),
    (Engine, "schedule", "schedule"),
    (Engine, "release", "schedule"),
    (Engine, "verify", "lay out batch"),
    (Engine, "accept", "emit"),
    (Engine, "draft", "rest"),
    (engine_module, "greedy", "argmax"),
    (engine_module, "accept", "walk"),
    (KVCache, "move", "walk"),
    (FeatureCache, "move", "walk"),
    (Proposer, "propose", "drafter"),
    (PEagle, "logits", "drafter"),
    (Eagle3, "logits", "drafter"),
    (Chooser, "__call__", "choose"),
    (Chooser, "offers", "choose"),
    (engine_module, "grow", "grow"),
    (Draft, "first", "grow"),
    (Engine, "_look_up", "lookup"),
    (Budget, "choose", "budget"),
    (Budget, "keep", "budget"),
    (Engine, "learn", "budget"),
    (Calibration, "count", "budget"),
    (LookupCalibration, "count", "budget"),
]


class Stopwatch:
    """Seconds by label while it is on."""

    def __init__(self) -> None:
        self.seconds = Counter[str]()
        self.rounds = 0
        self._open = list[str]()  # labels of the calls that run, outermost first
        self._since = 0.0

    @contextmanager
    def on(self, model: Any) -> Iterator[None]:
        """Time the calls; those of the target's `model` are "target"."""
        calls = [*CALLS, (type(model), "forward", "target"), (type(model), "logits", "target")]
        with ExitStack() as patches:
            for owner, name, label in calls:
                timed = self._timed(getattr(owner, name), label)
                patches.enter_context(patch.object(owner, name, timed))
            yield

    def _timed(self, call: Callable[..., Any], label: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._note()
            self._open.append(label)
            try:
                return call(*args, **kwargs)
            finally:
                self._note()
                self._open.pop()

        return timed

    def _note(self) -> None:
        """What has passed belongs to the innermost call."""
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


def profile(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> Stopwatch:
    """The rounds that decode."""
    watch = Stopwatch()
    for prompt in prompts:
        run = llm.stream([prompt], params)
        [request] = run.requests
        while not request.output:
            run.step()
        with watch.on(llm.engine.model):
            while request.finish_reason is None:
                run.step()
                watch.rounds += 1
    return watch


def main() -> None:
    parser = options(__doc__, "round_profile.json")
    parser.add_argument("--limit", type=int, default=8, help="first N problems")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer")
    args = parser.parse_args()
    folders, best = heads(args), catalog_k()
    llm = load("bfloat16")
    prompts, params = (
        as_ids(llm, human_eval(args.limit)),
        SamplingParams(max_tokens=args.max_tokens),
    )
    ways = {
        "alone": llm.use(None),
        "EAGLE-3 chain": llm.use(folders["eagle3"], best["eagle3"]),
        "P-EAGLE chain": llm.use(folders["p-eagle"], best["p-eagle"]),
        "P-EAGLE, 12 nodes": llm.use(folders["p-eagle"], nodes=12),
        "P-EAGLE": llm.use(folders["p-eagle"]),
    }
    print(environment()["device"])
    rows = list[dict[str, Any]]()
    for name, used in ways.items():
        used.generate(prompts[:1], params)
        watch = profile(used, prompts, params)
        whole = sum(watch.seconds.values())
        ours = sum(watch.seconds[label] for label in OURS) / whole
        shares = {label: seconds / whole for label, seconds in watch.seconds.most_common()}
        shown = "  ".join(f"{label} {share:.1%}" for label, share in shares.items())
        print(f"{name}: {1000 * whole / watch.rounds:.2f} ms a round, choosing and walking "
              f"{ours:.1%}\n  {shown}")  # fmt: skip
        rows.append({
            "way": name,
            "rounds": watch.rounds,
            "ms_a_round": round(1000 * whole / watch.rounds, 3),
            "choosing_and_walking": round(ours, 4),
            "shares": {label: round(share, 4) for label, share in shares.items()},
        })  # fmt: skip
    settings = {
        "target": TARGET,
        "heads": {method: fingerprint(folder) for method, folder in folders.items()},
        "prompts": len(prompts),
        "max_tokens": args.max_tokens,
    }
    write_json(args.output, {**environment(), "settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
