"""Estimate memory, disk and hours of training a head, before anything is downloaded or run.

Shapes: N tokens of a sequence, E elements, D drafter hidden, F·E_t target features, V vocabulary.
"""

import json
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.data.captured import token_bytes
from peagle.errors import InputError, check_at_least
from peagle.methods.registry import method_of
from peagle.model.drafter import Drafter
from peagle.model.partial import outline
from peagle.model.target import Target
from peagle.model.tensors import main_memory
from peagle.train.config import TrainConfig
from peagle.train.elements import Segment, sample_elements
from peagle.train.loss import BLOCK
from peagle.train.passes import multiplies_bf16
from peagle.train.sampler import choose_segments, largest_pass, pass_cost
from peagle.train.spec import DEPTHS, HeadSpec, drafter_config
from peagle.train.trainee import LOSS_LOGITS, LOSS_ROWS

ADAMW = 20  # bytes a trained weight: float32 weight, gradient, two moments and average
GIB = 2**30
MOST = 1_000_000  # GiB, or price of an hour
# On a CPU, as measured (docs/notes/findings.md):
KERNELS = GIB // 10  # bytes: made for every number of rows, and kept
ALLOCATOR_GAPS = 1.2  # of what a step allocates and frees


@dataclass(frozen=True, slots=True)
class Training:
    """A training to plan.

    tokens: Number of answer tokens to train on.
    context: Length of a training sequence in tokens.
    answered: Fraction of the tokens that belong to answers (0 to 1), as `peagle data show` counts
        it.
    gpus: Number of GPUs to train on; 0 trains on the CPU.
    memory: Memory of one device in GiB. Default: this machine's, or 80 for a GPU.
    segments: Number of passes that a sequence is partitioned into. Default: the fewest that fit in
        memory.
    run: Output folder of a short run with these settings, whose throughput gives the hours,
        without those of measurements and checkpoints. Default: hours are not estimated.
    price: Price of one device for one hour, in any currency. Default: no cost is estimated.
    """

    tokens: int
    context: int
    answered: float = 1.0
    gpus: int = 0
    memory: float | None = None
    segments: int | None = None
    run: Path | None = None
    price: float | None = None

    def __post_init__(self) -> None:
        check_at_least(0, gpus=self.gpus)
        check_at_least(1, tokens=self.tokens, segments=self.segments)
        check_at_least(4, context=self.context)
        for name, most in {"answered": 1, "memory": MOST, "price": MOST}.items():
            value = getattr(self, name)
            if value is not None and not 0 < value <= most:
                raise InputError(f"must be above 0, at most {most}", field=name, value=value)

    @property
    def room(self) -> int:
        """Bytes of one device."""
        device = 80 * GIB if self.gpus else main_memory()[0]
        return int(self.memory * GIB) if self.memory else device


class Plan(NamedTuple):
    """Memory of one process by part (bytes), and disk, hours and cost of the whole run."""

    memory: dict[str, int]
    segments: int
    captured: int  # bytes on disk, bf16, should the features be captured
    hours: float | None  # None: no throughput is known
    cost: float | None  # None: hours or price are not known

    @property
    def total(self) -> int:
        return sum(self.memory.values())


def plan(name: str, spec: HeadSpec, training: Training) -> Plan:
    """Add up what one process keeps at the peak of a step: in a pass of the drafter, next to the
    states of the target called `name`, of which only the configuration is downloaded."""
    rate = None if training.run is None else measured_rate(training.run)
    target = outline(name)
    dense = not training.gpus
    gaps = ALLOCATOR_GAPS if dense else 0.0
    config = drafter_config(target, spec, mask_token_id=0)
    drafter = method_of(config).build(config)
    drafter.share_embedding(torch.zeros(1, config.transformer.hidden_size))
    layers = len(config.feature_layers) + 1  # and the final hidden state
    width = target.config.hidden_size
    devices = max(training.gpus, 1)
    documents = torch.zeros(training.context, dtype=torch.int64)
    whole = _elements(spec, documents, training.answered)
    kept = {
        "runtime": _runtime() + KERNELS if dense else 0,
        "target": sum(p.numel() * p.element_size() for p in target.model.parameters()),
        "drafter and optimizer": ADAMW * sum(p.numel() for p in drafter.parameters()),
    }
    of_step = {
        "target states": training.context * layers * width * target.dtype.itemsize,
        "loss": _loss_bytes(target, drafter, len(whole.trained), dense=dense),
    }
    passes = pass_cost(drafter, bf16=not dense or multiplies_bf16(torch.device("cpu")))
    left = (training.room - sum(kept.values())) / (1 + gaps) - sum(of_step.values())
    segments = training.segments or choose_segments(whole, documents, passes, left)
    of_step |= {"activations": int(passes.of(largest_pass(whole, documents, segments)))}
    memory = {**kept, **of_step, "allocator": int(gaps * sum(of_step.values()))}
    captured = round(training.tokens / training.answered) * token_bytes(width, layers - 1)
    hours = None if rate is None else training.tokens / rate / devices / 3600
    cost = hours and training.price and hours * training.price * devices
    return Plan(memory, segments, captured, hours, cost)


def _elements(spec: HeadSpec, documents: Tensor, answered: float) -> Segment:
    """Elements of a sequence, whose last tokens are the answer, as training samples them."""
    train = TrainConfig(Path())
    answer = torch.arange(len(documents)) >= (1 - answered) * len(documents)
    generator = torch.Generator().manual_seed(0)
    return sample_elements(answer, documents, spec.depths or DEPTHS, train.ratio, generator)


def measured_rate(run: Path) -> float:
    """Return the answer tokens per second of one process of an earlier run, from the later half of
    its metrics.jsonl. Raises InputError when that is missing or too short."""
    file = run / "metrics.jsonl"
    if not file.is_file():
        fix = "name the output of peagle train"
        raise InputError("no metrics.jsonl there", field="run", value=run, fix=fix)
    # What follows the last newline is half written, by a run that goes on or was killed.
    lines = [json.loads(line) for line in file.read_text().split("\n")[:-1]]
    if len(lines) < 2:
        raise InputError(f"{len(lines)} steps are too few to time", field="run", value=run)
    first = lines[(len(lines) - 1) // 2]
    last = lines[-1]
    answered = (last["answer_tokens"] - first["answer_tokens"]) / last.get("processes", 1)
    return answered / max(last["seconds"] - first["seconds"], 1e-9)


def _loss_bytes(target: Target, drafter: Drafter, elements: int, *, dense: bool) -> int:
    """Bytes of the gradients at the last hidden states and at the draft head, of the target's head
    over the draft vocabulary, and of a chunk's logits: the target's, the drafter's and their
    gradient, and what the loss makes in float32 of the rows that it compares together."""
    hidden = target.embedding.shape[1]
    draft_vocab = drafter.config.draft_vocab_size
    gradients = elements * hidden * 4 + 2 * draft_vocab * hidden * 4
    head = draft_vocab * hidden * target.dtype.itemsize
    rows = LOSS_ROWS if dense else LOSS_LOGITS // draft_vocab
    compared = BLOCK if dense else rows
    return gradients + head + draft_vocab * (rows * 4 * 2 + compared * 4 * 4)


def _runtime() -> int:
    """Python and the libraries, as they are loaded now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
