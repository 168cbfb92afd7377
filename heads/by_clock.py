"""Train a shipped head further until a time, on a GPU.

    python heads/by_clock.py p-eagle OUTPUT UNTIL old.jsonl new.jsonl READY

A few steps on the old answers compile all that training runs. The new ones join them when the file
READY appears: they may be made meanwhile. From then on the learning rate rises, stays, and falls to
0 over the last 40 % of the time, which ends at UNTIL (seconds since 1970). Then OUTPUT/head is
written. Without new answers it ends then, too, and writes nothing.
"""

import os
import signal
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from peagle.data.dataset import read_examples
from peagle.data.documents import Documents
from peagle.heads.load import load_drafter
from peagle.model.loader import load_target
from peagle.train import trainer
from peagle.train.batches import Batches
from peagle.train.config import TrainConfig
from peagle.train.sampler import TrainingSequence
from peagle.train.warm_start import with_correction

TARGET = "smollm2-135m"
PACK = 24_576  # tokens of a step: a GPU's time is then more than Python's
LONGEST = 2048  # tokens of a document
WARM = 40  # steps on the old answers
RISE = 100  # steps in which the learning rate rises
FALL = 0.4  # share of the time in which it falls
# Depths weigh 0.7 and 0.8 of the one before: what a place is worth is so much of the place before.
SETTINGS: dict[str, dict[str, float]] = {
    "p-eagle": {"lr": 1.2e-3, "ratio": 0.7, "decay": 1.0},
    "eagle3": {"lr": 1.4e-3, "ratio": 0.7, "decay": 0.8},
}


class Clocked(trainer.Trainer):
    """Makes each step's batch during the step before, takes new documents when they are there, and
    ends by the clock."""

    def __init__(self, until: float, new: Path, ready: Path, *args: Any) -> None:
        super().__init__(*args)
        self.begin, self.until = time.time(), until
        self.new, self.ready = new, ready
        self.thread = ThreadPoolExecutor(1)
        self.next: Future[list[TrainingSequence]] | None = None
        trainer.rate = self.rate

    def rate(self, step: int, *_: float) -> float:
        """Share of the peak learning rate."""
        left = self.until - time.time()
        if left <= 0:
            os.kill(os.getpid(), signal.SIGTERM)  # training ends after this step
        cool = FALL * (self.until - self.begin)
        return max(0.0, min(1.0, (step + 1) / RISE, left / cool))

    def _settings(self) -> dict[str, object]:
        return {}  # the run is not resumed

    def _sample(self) -> list[TrainingSequence]:
        step = self.progress.step
        if step == WARM:
            self._take_new()
        now = self.next.result() if self.next else self._make(step)
        self.next = None if step + 1 == WARM else self.thread.submit(self._make, step + 1)
        return now

    def _take_new(self) -> None:
        print(f"{WARM} steps done", flush=True)
        while not self.ready.exists():
            if self._asked or time.time() > self.until:
                sys.exit(f"{self.ready}: not there in time: no new answers")
            time.sleep(0.1)
        self.begin = time.time()
        more = documents(self.target, self.new)
        self.data = Documents([*self.data.parts, *more.parts])
        self.batches = self.sampler.batches = batches_of(self.data)
        print(f"{len(self.data)} documents", flush=True)

    def _make(self, step: int) -> list[TrainingSequence]:
        return [self.sampler.sample(number) for number in self.batches.numbers(step)]


def documents(target: Any, file: Path) -> Documents[Any]:
    return read_examples(file, target.tokenizer, LONGEST)


def batches_of(data: Documents[Any]) -> Batches:
    return Batches(data, batch=1, pack=PACK, seed=1)


def main() -> None:
    method, output, until, *files = sys.argv[1:]
    old, new, ready = map(Path, files)
    target = load_target(TARGET)
    head = load_drafter(str(Path(__file__).with_name(f"{TARGET}-{method}")), target).float()
    if method == "p-eagle":
        head = with_correction(head, frozen=False)
    fixed = {"output": Path(output), "pack": PACK, "segments": 1}
    config = TrainConfig(**fixed, steps=10**9, save_every=10**9, **SETTINGS[method])
    run = Clocked(float(until), new, ready, config, target, head, documents(target, old))

    def show(metrics: dict[str, Any]) -> None:
        if metrics["step"] % 100 in {1, 2}:
            print(metrics, flush=True)

    run.run(show)
    print(f"{run.progress.answer_tokens} answer tokens in {run.progress.step} steps", flush=True)


if __name__ == "__main__":
    main()
