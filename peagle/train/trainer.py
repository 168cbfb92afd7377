"""The training loop: sample → forward → backward → log."""

import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from peagle.data.example import Examples, fingerprint
from peagle.errors import InputError
from peagle.heads.save import save_drafter, with_provenance
from peagle.methods.registry import method_of
from peagle.model.base_target import TargetOutput
from peagle.model.drafter import Drafter
from peagle.train import processes, state
from peagle.train.batches import Batches
from peagle.train.config import OF_HEAD, OF_LAYERS, RESUME_FIXED, TrainConfig
from peagle.train.optimizer import Average, make_optimizer, rate
from peagle.train.passes import compile_layers, fast_products, recompute_layers, run_target
from peagle.train.sampler import Sampler, TrainingSequence
from peagle.train.trainee import StepResult, Trainee

if TYPE_CHECKING:  # a target is an argument, as a backend is
    from peagle.engine.request import Stats
    from peagle.model.target import Target


# Returns the target's output for documents, by their numbers, one after another.
States = Callable[[list[int], "Target"], TargetOutput]
# Measures a drafter in the target's dtype; all processes call it together (train/walk.py).
Measure = Callable[[Drafter], "Stats"]


class Trainer:
    """Trains `drafter` (float32) for `target` on documents.

    Under several processes (torchrun, accelerate launch) each takes its share of a step's
    sequences; process 0 alone writes.
    """

    def __init__(  # noqa: PLR0913, PLR0917 (the inputs of training)
        self,
        config: TrainConfig,
        target: "Target",
        drafter: Drafter,
        data: Examples,
        measure: Measure | None = None,  # None: no acceptance length while it trains
        states: States | None = None,  # of `data`, captured; None: the target runs over it
        device: torch.device | None = None,  # where to train, when both wait on the CPU for `shard`
    ) -> None:
        self.config = config
        self.target = target
        self.drafter = drafter.train()
        drafter.share_embedding(target.embedding)  # a head turned to float32 has a copy of it
        self.data = data
        self.measure = measure
        self.states = states
        device = device or target.device
        self.accelerator = processes.make_accelerator(device, config.output, config.tracker)
        self.world = self.accelerator.num_processes
        check(config, target, drafter, self.world)
        self.batches = Batches(data, batch=config.batch, pack=config.pack, seed=config.seed)
        self.sampler = Sampler(config, self.batches, drafter.to(device))
        self.trainee = self._wrap(device)
        self.optimizer = make_optimizer(drafter, config)
        self.average = Average(drafter)
        # Where only a correction is trained; as a setting of the run.
        self.frozen = None if drafter.norm.weight.requires_grad else "frozen"
        self.earlier_data = drafter.config.provenance.data  # counts of runs before this one
        self.progress = state.Progress(settings=self._settings())
        self.total_steps = self._total_steps()
        self._asked = False  # to stop, by a signal to this process
        self._stop = False  # agreed by all processes

    def _wrap(self, device: torch.device) -> Any:
        """Drafter and loss as this run's processes train them: compiled, then sharded or copied."""
        config = self.config
        compiled = device.type == "cuda" if config.compile is None else config.compile
        if compiled and method_of(self.drafter.config).parallel:
            compile_layers(self.drafter)
        if config.recompute:
            recompute_layers(self.drafter)
        trainee = Trainee(self.drafter, self.target, config.decay)
        if config.shard:
            return processes.shard(trainee, device)
        return self.accelerator.prepare_model(trainee)

    def _settings(self) -> dict[str, object]:
        """Settings that a run is continued with."""
        head = self.drafter.config
        made_for = f"{head.provenance.config_hash} {head.provenance.weights_hash}"
        fixed = {"target": made_for, "feature_layers": list(head.feature_layers)}
        fixed["chat_template"] = head.provenance.template_hash
        fixed |= {name: getattr(head, name) for name in OF_HEAD.split()}
        fixed |= {name: getattr(head.transformer, name) for name in OF_LAYERS.split()}
        fixed |= {name: getattr(self.config, name) for name in RESUME_FIXED}
        data = {"documents": len(self.data), "data": fingerprint(self.data)[:16]}
        start = {"init_from": bool(self.earlier_data), "init_from[data]": self.earlier_data}
        return fixed | data | start | {"correction": self.frozen}

    def run(self, on_step: Callable[[dict[str, Any]], None] = lambda metrics: None) -> None:
        """Train to the end, or to the next step's end after SIGINT or SIGTERM; the state is on disk
        when this returns. Raises FloatingPointError when the loss is not finite."""
        if self.target.device.type == "cpu":
            processes.keep_freed_memory()
        # cuDNN's attention plans anew for every number of rows: 2 ms a call on an H200.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.config.output.mkdir(parents=True, exist_ok=True)
        before = {n: signal.signal(n, self._ask_to_stop) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            with fast_products(self.target.device):
                while not (self.finished or self._stop or (self._asked and self.world == 1)):
                    started = time.perf_counter()
                    work = self._sample()
                    result = self._forward_backward(work, self._reduce_counts(work))
                    self._update(result)
                    on_step(self._log(result, time.perf_counter() - started))
                    if not self.finished and self.progress.step % self.config.save_every == 0:
                        self._save()
                self._save()
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
        # A process that leaves a group by its exit may abort, though all is done.
        self.accelerator.end_training()

    @property
    def finished(self) -> bool:
        patience = self.config.patience or float("inf")
        return self.progress.stale >= patience or self.progress.step >= self.total_steps

    def _sample(self) -> list[TrainingSequence]:
        """This process's sequences of the step."""
        share = slice(self.accelerator.process_index, None, self.world)
        work = [self.sampler.sample(i) for i in self.batches.numbers(self.progress.step)[share]]
        passes = [item.segments for item in work]
        if self.config.shard:
            processes.pad_passes(passes, self.target.device)
        elif not any(passes):  # gradients are averaged in the last pass of every process
            passes[-1].append(processes.idle_pass(self.target.device))
        return work

    def _reduce_counts(self, work: list[TrainingSequence]) -> float:
        """The step's chains over all processes. Counts its answer tokens; a signal to one process
        stops all after the same step."""
        here = [sum(item.chains for item in work), sum(item.answer_tokens for item in work)]
        counts = self._sum([*here, float(self._asked)])
        self.progress.answer_tokens += int(counts[1])
        self._stop = bool(counts[2])
        return float(counts[0])

    def _forward_backward(self, work: list[TrainingSequence], chains: float) -> StepResult:
        """Accumulate the gradient of the loss, a mean over the step's chains."""
        loss = 0.0
        hits = torch.zeros(2, self.sampler.depths, dtype=torch.int64, device=self.target.device)
        left = sum(len(item.segments) for item in work)
        for item in work:
            output = self._target_output(item)
            for segment in item.segments:
                left -= 1
                # Of copies only: sharded gradients are summed into their parts by every backward.
                with self.accelerator.no_sync(self.trainee) if left else nullcontext():
                    result = self.trainee(item.sequence, output, segment)
                    # Gradients are averaged over processes: their number undoes that.
                    (result.loss * (self.world / max(chains, 1))).backward()
                loss += float(result.loss.detach())
                hits[:, : len(result.correct)] += torch.stack([result.correct, result.supervised])
        total = self._sum([loss, *hits.flatten().tolist()])
        return StepResult(total[0], *total[1:].to(torch.int64).view_as(hits))

    def _target_output(self, item: TrainingSequence) -> TargetOutput:
        """The target's output for a sequence: computed, or captured before."""
        if self.states is None:
            return run_target(self.target, item.sequence, self.drafter.config.feature_layers)
        output = self.states(item.sequence.numbers, self.target)
        assert len(output.hidden) == len(item.sequence.ids), "data is not what was captured"
        return output

    def _update(self, result: StepResult) -> None:
        step = self.progress.step
        if not torch.isfinite(result.loss):
            saved = state.checkpoints(self.config.output)
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
        shares = result.correct / result.supervised.clamp(min=1)
        metrics = {
            "step": progress.step,
            "answer_tokens": progress.answer_tokens,
            "processes": self.world,
            "loss": round(float(result.loss) / max(int(result.supervised[0]), 1), 4),
            "accuracy": [round(share, 4) for share in shares.tolist()],
            "lr": self.optimizer.param_groups[0]["lr"],
            "seconds": round(progress.seconds, 2),
        }
        if self.measure and (progress.step % self.config.eval_every == 0 or self.finished):
            metrics |= self._measured(self.measure)
        if self.accelerator.is_main_process:
            state.append_line(self.config.output / state.METRICS, metrics)
        self.accelerator.log(processes.numbers(metrics), step=progress.step)
        return metrics

    def _measured(self, measure: "Measure") -> dict[str, Any]:
        """Acceptance as `measure` finds it; the best head so far is kept in `best/`."""
        progress = self.progress
        stats = measure(self.averaged(self.target.dtype))
        found: dict[str, Any] = {"acceptance_length": round(stats.acceptance_length, 4)}
        found["accepted_per_position"] = [round(share, 4) for share in stats.accepted_per_position]
        progress.acceptance = {"held out": {"k": len(stats.accepted), **found}}
        progress.stale += 1
        if stats.acceptance_length > progress.best_acceptance:
            progress.best_acceptance = stats.acceptance_length
            progress.stale = 0
            self.save_head("best")
        return found

    def _save(self) -> None:
        tensors = state.snapshot(self.drafter, self.optimizer, self.average)
        if self.accelerator.is_main_process:
            state.save_checkpoint(self.config.output, tensors, self.progress, self.config.keep)
        self.save_head("head")
        self.accelerator.wait_for_everyone()

    def save_head(self, name: str) -> None:
        """Write the averaged head, bf16, to a folder of `output`; all processes call it."""
        done = {"answer_tokens": self.progress.answer_tokens, "steps": self.progress.step}
        if self.frozen:
            done = {f"correction_{name}": count for name, count in done.items()}
        total = {name: count + self.earlier_data.get(name, 0) for name, count in done.items()}
        acceptance = self.progress.acceptance or self.drafter.config.provenance.acceptance
        with_provenance(self.drafter, data=self.earlier_data | total, acceptance=acceptance)
        drafter = self.averaged(torch.bfloat16)
        if self.accelerator.is_main_process:
            save_drafter(drafter, self.config.output / name)

    def averaged(self, dtype: torch.dtype) -> Drafter:
        """A copy of the head with averaged weights, whole; all processes call it together."""
        weights = self.drafter.state_dict() | self.average.weights
        return processes.rebuilt(self.drafter, self.drafter.config, weights).to(dtype).eval()

    def _sum(self, numbers: list[float]) -> Tensor:
        """Over all processes."""
        local = torch.tensor(numbers, dtype=torch.float64, device=self.target.device)
        return self.accelerator.reduce(local, "sum").cpu()

    def _total_steps(self) -> int:
        if self.config.steps is not None:
            return self.config.steps
        sequences = self.batches.sequences(self.config.epochs)
        if tokens := self.config.max_train_tokens:
            sequences = -(-tokens * self.batches.sequences(1) // self.batches.answer_tokens)
        return -(-sequences // self.config.batch)

    def _ask_to_stop(self, *_: object) -> None:
        self._asked = True


def check(config: TrainConfig, target: "Target", drafter: Drafter, world: int) -> None:
    """Raises InputError for settings that do not fit head, target or number of processes."""
    target.check_layers(drafter.config.feature_layers)
    if config.batch % world:
        why = f"must be a multiple of the {world} processes"
        raise InputError(why, field="batch", value=config.batch)
    if config.shard and world == 1:
        raise InputError("needs several processes", field="shard", fix="start them by torchrun")
    for name in ("recompute", "compile"):
        if getattr(config, name) and not (method := method_of(drafter.config)).parallel:
            why = f"is not supported for {method.title}"
            raise InputError(why, field=name, fix="leave it out")
