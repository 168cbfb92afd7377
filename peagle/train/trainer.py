"""The training loop: sample → forward → backward → log."""

import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from peagle.config import InputError
from peagle.data.chat import Example
from peagle.model.checkpoint import save_drafter, with_provenance
from peagle.model.config import Method
from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.train.cod import sample_elements
from peagle.train.loss import LossName
from peagle.train.state import append_line, load_checkpoint, save_checkpoint
from peagle.train.step import ROW_TILE, Sequence, StepResult, compare, run_drafter, run_target


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How a head is trained."""

    output: Path  # checkpoint/, head/ and metrics.jsonl are written here
    method: Method = "p-eagle"
    layers: int = 4  # of the drafter
    depths: int = 8  # K trained for
    draft_vocab: int = 8192  # most frequent answer tokens
    max_length: int = 1024  # tokens of a document
    steps: int | None = None  # optimizer steps, one document each; else epochs or max_train_tokens
    epochs: int = 1
    max_train_tokens: int | None = None  # answer tokens
    lr: float = 6e-4  # AdamW, linear warm-up over 1 % of the run, then linear to zero
    ratio: float = 0.7  # COD r, for both methods
    floor: float = 0.1  # COD r_min
    loss: LossName = "kl"
    seed: int = 0
    save_every: int = 200  # steps

    def __post_init__(self) -> None:
        for name in ("layers", "depths", "draft_vocab", "epochs", "save_every"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} {getattr(self, name)}: must be at least 1")
        for name in ("steps", "max_train_tokens", "lr"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise InputError(f"{name} {value}: must be above 0")
        if not 0 < self.ratio <= 1 or not 0 <= self.floor <= 1:
            raise InputError(f"ratio {self.ratio}, floor {self.floor}: must lie between 0 and 1")
        if self.max_length < 4:
            raise InputError(f"max_length {self.max_length}: must be at least 4 tokens")


@dataclass(slots=True)
class Progress:
    """Where a run stands."""

    step: int = 0
    answer_tokens: int = 0
    seconds: float = 0.0


class Trainer:
    """Trains `drafter` (float32) for `target` on documents; one document is one optimizer step."""

    def __init__(
        self, config: TrainConfig, target: Target, drafter: Drafter, data: list[Example]
    ) -> None:
        self.config, self.target, self.drafter, self.data = config, target, drafter.train(), data
        target.tap(drafter.config.feature_layers)
        target.row_tile = ROW_TILE
        # Fused AdamW is one pass over the weights; on two cores it halves the optimizer's share.
        self.optimizer = torch.optim.AdamW(
            drafter.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.progress = Progress()
        self.total_steps = total_steps(config, data)
        self._stop = False

    def resume(self) -> None:
        """Continue from `output/checkpoint`. Raises InputError when there is none."""
        folder = self.config.output / "checkpoint"
        if not folder.is_dir():
            raise InputError(f"--resume: no checkpoint in {self.config.output}")
        self.progress = Progress(**load_checkpoint(folder, self.drafter, self.optimizer))  # type: ignore[arg-type]
        self.progress.step = int(self.progress.step)

    def run(self, on_step: Callable[[dict[str, Any]], None] = lambda metrics: None) -> None:
        """Train to the end, or to the next step's end after SIGINT or SIGTERM; the state is on disk
        when this returns. Raises FloatingPointError when the loss is not finite."""
        before = {s: signal.signal(s, self._ask_to_stop) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            while self.progress.step < self.total_steps and not self._stop:
                started = time.perf_counter()
                sequence, elements = self._sample()
                result = self._forward(sequence, elements)
                self._backward(result)
                on_step(self._log(sequence, result, time.perf_counter() - started))
                if self.progress.step % self.config.save_every == 0:
                    self._save()
            self._save()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def finished(self) -> bool:
        return self.progress.step >= self.total_steps

    def _sample(self) -> tuple[Sequence, Any]:
        step, config = self.progress.step, self.config
        epoch, index = divmod(step, len(self.data))
        order = torch.randperm(len(self.data), generator=_generator(config.seed, epoch))
        example = self.data[int(order[index])]
        device = self.target.device
        ids = torch.tensor(example.ids, device=device)
        supervised = torch.tensor(example.supervised, device=device)
        sequence = Sequence(ids, supervised, torch.zeros_like(ids))
        generator = _generator(config.seed + 1, step)
        elements = sample_elements(
            *sequence[1:], config.depths, config.ratio, config.floor, generator
        )
        return sequence, elements

    def _forward(self, sequence: Sequence, elements: Any) -> StepResult:
        features, labels = run_target(self.target, self.drafter, sequence)
        with torch.autocast(self.target.device.type, torch.bfloat16):
            normed = run_drafter(self.drafter, sequence, features, elements)
            return compare(self.drafter, elements, normed, labels, self.config.loss)

    def _backward(self, result: StepResult) -> None:
        loss = result.loss / max(result.count, 1)
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"loss is {float(loss.detach())} at step {self.progress.step}; "
                f"the last good checkpoint is in {self.config.output / 'checkpoint'}"
            )
        lr = learning_rate(self.config.lr, self.progress.step, self.total_steps)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        self.optimizer.step()

    def _log(self, sequence: Sequence, result: StepResult, seconds: float) -> dict[str, Any]:
        progress = self.progress
        progress.step += 1
        progress.answer_tokens += int(sequence.supervised.sum())
        progress.seconds += seconds
        metrics = {
            "step": progress.step,
            "answer_tokens": progress.answer_tokens,
            "loss": round(float(result.loss.detach()) / max(result.count, 1), 4),
            "accuracy": _shares(result.correct, result.supervised),
            "lr": self.optimizer.param_groups[0]["lr"],
            "seconds": round(progress.seconds, 2),
        }
        append_line(self.config.output / "metrics.jsonl", metrics)
        return metrics

    def _save(self) -> None:
        folder = self.config.output / "checkpoint"
        save_checkpoint(folder, self.drafter, self.optimizer, asdict(self.progress))
        self.save_head()

    def save_head(self) -> None:
        """Write the servable head, bf16, to `output/head`."""
        done = {"answer_tokens": self.progress.answer_tokens, "steps": self.progress.step}
        with_provenance(self.drafter, data=done)
        save_drafter(self.drafter, self.config.output / "head")

    def _ask_to_stop(self, signum: int, frame: FrameType | None) -> None:
        self._stop = True


def total_steps(config: TrainConfig, data: list[Example]) -> int:
    """Optimizer steps of the whole run."""
    if config.steps is not None:
        return config.steps
    if config.max_train_tokens is None:
        return config.epochs * len(data)
    mean = sum(sum(example.supervised) for example in data) / len(data)
    return max(1, round(config.max_train_tokens / mean))


def learning_rate(peak: float, step: int, total: int) -> float:
    """Linear warm-up over 1 % of the steps, then linear decay to zero."""
    warm = max(1, total // 100)
    return peak * min((step + 1) / warm, (total - step) / max(1, total - warm))


def _generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


def _shares(correct: Tensor, total: Tensor) -> list[float]:
    pairs = zip(correct.tolist(), total.tolist(), strict=True)
    return [round(c / t, 4) if t else 0.0 for c, t in pairs]
