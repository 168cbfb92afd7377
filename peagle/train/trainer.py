"""The training loop: sample → forward → backward → log."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from peagle.data.example import Example, fingerprint
from peagle.errors import InputError
from peagle.methods.registry import method_of
from peagle.methods.save import save_drafter, with_provenance
from peagle.model.device import free_memory, keep_freed_memory
from peagle.model.drafter import Drafter
from peagle.model.target import Target, TargetOutput
from peagle.train.average import Average
from peagle.train.batches import Batches
from peagle.train.cod import sample_elements
from peagle.train.config import RESUME_FIXED, TrainConfig
from peagle.train.drafter_pass import compile_layers
from peagle.train.memory import SHARE, choose_segments, pass_cost
from peagle.train.optimizer import make_optimizer, rate
from peagle.train.partition import Segment, partition
from peagle.train.processes import make_accelerator, numbers
from peagle.train.sequence import Sequence
from peagle.train.sequence import supervised_elements as supervised
from peagle.train.sharding import pad_passes, shard, whole_copy
from peagle.train.state import (
    METRICS,
    SETTINGS,
    Progress,
    append_line,
    checkpoints,
    save_checkpoint,
    snapshot,
    write_settings,
)
from peagle.train.target_pass import run_target
from peagle.train.trainee import StepResult, Trainee

if TYPE_CHECKING:
    from peagle.engine.request import Stats


# Returns the target's output for documents, by their numbers, one after another.
States = Callable[[list[int], Target], TargetOutput]
# Measures a drafter in the target's dtype; all processes call it together (train/walk.py).
Measure = Callable[[Drafter], "Stats"]


class TrainingSequence(NamedTuple):
    """One sequence, and the passes that train it."""

    number: int  # of the sequence, counted from the start of training
    sequence: Sequence
    segments: list[Segment]
    chains: int  # supervised elements at depth 0, one for each chain


class Trainer:
    """Trains `drafter` (float32) for `target` on documents.

    Under several processes (torchrun, accelerate launch) each takes its share of a step's
    sequences; process 0 alone writes.
    """

    def __init__(  # noqa: PLR0913, PLR0917 (what training needs)
        self,
        config: TrainConfig,
        target: Target,
        drafter: Drafter,
        data: list[Example],
        measure: Measure | None = None,  # None: no acceptance length while it trains
        states: States | None = None,  # of `data`, captured; None: the target runs over it
        device: torch.device | None = None,  # where to train, when both wait on the CPU for `shard`
    ) -> None:
        self.config, self.target, self.drafter = config, target, drafter.train()
        self.measure, self.states = measure, states
        target.check_layers(drafter.config.feature_layers)
        device = device or target.device
        self.accelerator = make_accelerator(device, config.output, config.tracker)
        self.world = self.accelerator.num_processes
        if config.batch % self.world:
            raise InputError(
                f"batch {config.batch}: must be a multiple of the {self.world} processes"
            )
        if config.shard and self.world == 1:
            raise InputError("shard true: needs several processes, started by torchrun")
        if drafter.config.depths is None:
            raise InputError("depths: name how many draft tokens the head is trained for")
        self.depths = drafter.config.depths
        method = method_of(drafter.config)
        drafter.recompute = config.recompute
        if config.recompute and not method.parallel:
            raise InputError(f"recompute true: {method.title}'s depths share keys: leave it out")
        self._cost = pass_cost(drafter.to(device))
        compiled = device.type == "cuda" if config.compile is None else config.compile
        if compiled and method.parallel:
            compile_layers(drafter)
        self.trainee: Any = Trainee(drafter, target, config.decay)
        if config.shard:
            shard(self.trainee, target, device)
        else:
            self.trainee = self.accelerator.prepare_model(self.trainee)
        self.optimizer = make_optimizer(drafter, config)
        self.average = Average(drafter)
        self.drafted = drafter.target_ids.cpu()
        lasting = {name: getattr(config, name) for name in RESUME_FIXED}
        self.frozen = not drafter.norm.weight.requires_grad  # but for its correction
        self.settings = {**lasting, "frozen head": self.frozen}
        self.data = data
        self.earlier = drafter.config.provenance.data  # of a run before this one
        self.batches = Batches(data, batch=config.batch, pack=config.pack, seed=config.seed)
        self.progress = Progress()
        self.total_steps = self._total_steps(data)
        self._stop = False

    def run(self, on_step: Callable[[dict[str, Any]], None] = lambda metrics: None) -> None:
        """Train to the end, or to the next step's end after SIGINT or SIGTERM; the state is on disk
        when this returns. Raises FloatingPointError when the loss is not finite."""
        if self.target.device.type == "cpu":
            keep_freed_memory()
        # cuDNN's attention plans anew for every number of rows: 2 ms a call on an H200.
        torch.backends.cuda.enable_cudnn_sdp(False)
        if self.accelerator.is_main_process:
            known = {"documents": len(self.data), "data": fingerprint(self.data)[:16]}
            write_settings(self.config.output / SETTINGS, self.settings | known)
        with _signals(self._ask_to_stop):
            while not self.finished and not self._stop:
                started = time.perf_counter()
                work = self._sample()
                result = self._forward_backward(work, self._agree(work))
                self._update(result)
                on_step(self._log(result, time.perf_counter() - started))
                if self.progress.step % self.config.save_every == 0:
                    self._save()
            self._save()
        # A process that leaves a group by its exit may abort, though all is done.
        self.accelerator.end_training()

    @property
    def finished(self) -> bool:
        patience = self.config.patience or float("inf")
        return self.progress.stale >= patience or self.progress.step >= self.total_steps

    def _sample(self) -> list[TrainingSequence]:
        """This process's sequences of the step, their elements drawn and partitioned."""
        every = self.batches.numbers(self.progress.step)
        mine = every[self.accelerator.process_index :: self.world]
        work = [self._work(number) for number in mine]
        if self.config.shard:
            pad_passes([item.segments for item in work], self.target.device)
        return work

    def _work(self, number: int) -> TrainingSequence:
        config, cpu = self.config, self.batches.sequence(number)
        # A token outside the draft vocabulary ends every draft, so elements after it never count.
        cpu = cpu._replace(supervised=cpu.supervised & torch.isin(cpu.ids, self.drafted))
        generator = torch.Generator().manual_seed((config.seed + 1) * 1_000_003 + number)
        elements = sample_elements(*cpu[1:], self.depths, config.ratio, generator)
        chains = int((elements.depth[supervised(cpu, elements)] == 0).sum())
        parts = partition(elements, cpu.documents, config.segments or self._segments(cpu, elements))
        parts = [p for p in parts if (p.own & supervised(cpu, p.elements)).any()]
        work: TrainingSequence = send_to_device(
            TrainingSequence(number, cpu, parts, chains), self.target.device
        )
        return work

    def _segments(self, sequence: Sequence, elements: Any) -> int:
        device = self.target.device
        room, dense = SHARE * free_memory(device), device.type == "cpu"
        return choose_segments(elements, sequence.documents, self._cost, room, dense=dense)

    def _agree(self, work: list[TrainingSequence]) -> float:
        """The step's chains over all processes; a signal to one stops all."""
        tokens = sum(self.batches.answer_tokens(item.number) for item in work)
        chains = sum(item.chains for item in work)
        counts = self._sum([chains, tokens, float(self._stop)])
        self.progress.answer_tokens += int(counts[1])
        self._stop = bool(counts[2])
        return float(counts[0])

    def _forward_backward(self, work: list[TrainingSequence], chains: float) -> StepResult:
        """Accumulate the gradient of the loss, a mean over the step's chains."""
        loss, hits = 0.0, torch.zeros(2, self.depths, dtype=torch.int64, device=self.target.device)
        for item in work:
            output = self._target_output(item)
            for segment in item.segments:
                last = item is work[-1] and segment is item.segments[-1]
                # Of copies only: sharded gradients are summed into their parts by every backward.
                wait = nullcontext() if last else self.accelerator.no_sync(self.trainee)
                with wait:
                    result = self.trainee(item.sequence, output, segment)
                    # Gradients are averaged over processes: their number undoes that.
                    (result.loss * (self.world / max(chains, 1))).backward()
                loss += float(result.loss.detach())
                hits[:, : len(result.correct)] += torch.stack([result.correct, result.supervised])
        total = self._sum([loss, *hits.flatten().tolist()])
        return StepResult(total[0], *total[1:].to(torch.int64).view(2, self.depths))

    def _target_output(self, item: TrainingSequence) -> TargetOutput:
        """The target's output for a sequence: computed, or captured before."""
        if self.states is None:
            return run_target(self.target, item.sequence, self.drafter.config.feature_layers)
        output = self.states(self.batches.documents(item.number), self.target)
        assert len(output.hidden) == len(item.sequence.ids), "data is not what was captured"
        return output

    def _update(self, result: StepResult) -> None:
        step = self.progress.step
        if not torch.isfinite(result.loss):
            saved = checkpoints(self.config.output)
            good = f"the last good checkpoint is {saved[-1]}" if saved else "nothing was saved yet"
            bad = self.batches.numbers(step)
            why = f"loss is {float(result.loss)} at step {step} (sequences {bad[0]} to {bad[-1]})"
            raise FloatingPointError(f"{why}: {good}; lower `lr`, or look at the data")
        share = rate(step, self.total_steps, self.config.warmup, self.config.cooldown)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * share
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.average.update(step + 1)

    def _log(self, result: StepResult, seconds: float) -> dict[str, Any]:
        progress = self.progress
        progress.step += 1
        progress.seconds += seconds
        metrics = {
            "step": progress.step,
            "answer_tokens": progress.answer_tokens,
            "loss": round(float(result.loss) / max(int(result.supervised[0]), 1), 4),
            "accuracy": _shares(result.correct, result.supervised),
            "lr": self.optimizer.param_groups[0]["lr"],
            "seconds": round(progress.seconds, 2),
        }
        if self.measure is not None and (
            progress.step % self.config.eval_every == 0 or self.finished
        ):
            metrics |= self._measured(self.measure)
        if self.accelerator.is_main_process:
            append_line(self.config.output / METRICS, metrics)
        self.accelerator.log(numbers(metrics), step=progress.step)
        return metrics

    def _measured(self, measure: "Measure") -> dict[str, Any]:
        """Acceptance as `measure` finds it; the best head so far is kept in `best/`."""
        progress = self.progress
        stats = measure(self.averaged(self.target.dtype))
        shares = [round(share, 4) for share in stats.accepted_per_position]
        found: dict[str, Any] = {"acceptance_length": round(stats.acceptance_length, 4)}
        found |= {"accepted_per_position": shares}
        with_provenance(self.drafter, acceptance={"held out": {"k": len(shares), **found}})
        progress.stale += 1
        if stats.acceptance_length > progress.best_acceptance:
            progress.best_acceptance, progress.stale = stats.acceptance_length, 0
            self.save_head("best")
        return found

    def _save(self) -> None:
        tensors = snapshot(self.drafter, self.optimizer, self.average)
        if self.accelerator.is_main_process:
            save_checkpoint(self.config.output, tensors, self.progress, self.config.keep)
        self.save_head("head")
        self.accelerator.wait_for_everyone()

    def save_head(self, name: str) -> None:
        """Write the averaged head, bf16, to a folder of `output`; all processes call it."""
        done = {"answer_tokens": self.progress.answer_tokens, "steps": self.progress.step}
        if self.frozen:
            done = {f"correction_{name}": count for name, count in done.items()}
        total = {name: count + self.earlier.get(name, 0) for name, count in done.items()}
        with_provenance(self.drafter, data=self.earlier | total)
        drafter = self.averaged(torch.bfloat16)
        if self.accelerator.is_main_process:
            save_drafter(drafter, self.config.output / name)

    def averaged(self, dtype: torch.dtype) -> Drafter:
        """A copy of the head with averaged weights, whole; all processes call it together."""
        return whole_copy(self.drafter, dtype, self.average.over(self.drafter.state_dict()))

    def _sum(self, numbers: list[float]) -> Tensor:
        """Over all processes."""
        local = torch.tensor(numbers, dtype=torch.float64, device=self.target.device)
        return self.accelerator.reduce(local, "sum").cpu()

    def _total_steps(self, data: list[Example]) -> int:
        config = self.config
        if config.steps is not None:
            return config.steps
        if config.max_train_tokens is None:
            return self.batches.steps(config.epochs)
        tokens = sum(sum(example.supervised) for example in data)
        return max(1, round(config.max_train_tokens / tokens * self.batches.steps(1)))

    def _ask_to_stop(self, *_: object) -> None:
        self._stop = True


@contextmanager
def _signals(handler: Callable[..., None]) -> Iterator[None]:
    """SIGINT and SIGTERM call `handler` meanwhile."""
    before = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _shares(correct: Tensor, total: Tensor) -> list[float]:
    pairs = zip(correct.tolist(), total.tolist(), strict=True)
    return [round(c / t, 4) if t else 0.0 for c, t in pairs]
