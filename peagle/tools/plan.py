"""Estimate memory, disk and hours of training a head, before anything is downloaded or run.

Shapes: N tokens of a sequence, E elements, D drafter hidden, F·E_t target features, V vocabulary.
"""

import json
import resource
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.errors import InputError
from peagle.methods.registry import method_of
from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.train.config import TrainConfig
from peagle.train.elements import Elements, sample_elements
from peagle.train.loss import BLOCK
from peagle.train.sampler import choose_segments, largest_pass, pass_cost
from peagle.train.spec import HeadSpec, drafter_config
from peagle.train.trainee import LOSS_LOGITS, LOSS_ROWS

ADAMW = 20  # bytes a trained weight: float32 weight, gradient, two moments and average
GIB = 2**30
# On a CPU, as measured (docs/notes/findings.md):
KERNELS = GIB // 10  # bytes: made for every number of rows, and kept
ALLOCATOR_GAPS = 1.2  # of what a step allocates and frees


class Plan(NamedTuple):
    """Memory of one process by part (bytes), and disk and hours of the whole run."""

    memory: dict[str, int]
    segments: int
    captured: int  # bytes on disk, bf16, should the features be captured
    hours: float | None  # None: no throughput is known

    @property
    def total(self) -> int:
        return sum(self.memory.values())


def plan(  # noqa: PLR0913 (what decides)
    target: Target,
    spec: HeadSpec,
    *,
    tokens: int,
    context: int,
    segments: int | None,
    room: float,  # bytes of the device
    device: str,
    answered: float = 1.0,  # share of the tokens that are answers, 1: the most memory
    processes: int = 1,
    rate: float | None = None,  # answer tokens a second of one process, measured
) -> Plan:
    """Add up what one process keeps at the peak of a step: in a pass of the drafter, next to the
    target's states. Without `segments`, the fewest that fit into `room`."""
    dense = device == "cpu"
    gaps = ALLOCATOR_GAPS if dense else 0.0
    drafter = _drafter(target, spec)
    layers = len(drafter.config.feature_layers) + 1  # and the final hidden state
    states = layers * target.config.hidden_size * target.dtype.itemsize  # bytes per token
    documents = torch.zeros(context, dtype=torch.int64)
    elements = _elements(spec, documents, answered)
    kept = {
        "runtime": _runtime() + KERNELS if dense else 0,
        "target": sum(p.numel() * p.element_size() for p in target.model.parameters()),
        "drafter and optimizer": ADAMW * sum(p.numel() for p in drafter.parameters()),
    }
    of_step = {
        "target states": context * states,
        "loss": _loss_bytes(target, spec, len(elements.anchor), dense=dense),
    }
    cost = pass_cost(drafter)
    left = (room - sum(kept.values())) / (1 + gaps) - sum(of_step.values())
    segments = segments or choose_segments(elements, documents, cost, left)
    largest = largest_pass(elements, documents, segments)
    of_step |= {"activations": int(cost.of(largest))}
    memory = {**kept, **of_step, "allocator": int(gaps * sum(of_step.values()))}
    hours = None if rate is None else tokens / rate / processes / 3600
    return Plan(memory, segments, round(tokens / answered) * states, hours)


def _drafter(target: Target, spec: HeadSpec) -> Drafter:
    config = drafter_config(target, spec, mask_token_id=0)
    drafter = method_of(config).build(config)
    if config.embedding != "full":
        drafter.shared_embedding = torch.zeros(1, config.transformer.hidden_size)
    return drafter


def _elements(spec: HeadSpec, documents: Tensor, answered: float) -> Elements:
    """Elements of a sequence, whose last tokens are the answer, as training samples them."""
    train = TrainConfig(Path())
    answer = torch.arange(len(documents)) >= (1 - answered) * len(documents)
    generator = torch.Generator().manual_seed(0)
    return sample_elements(answer, documents, spec.depths, train.ratio, generator)


def measured_rate(run: Path) -> float:
    """Return the answer tokens per second of an earlier run, from the later half of its
    metrics.jsonl. Raises InputError when that is missing or too short."""
    file = run / "metrics.jsonl"
    if not file.is_file():
        fix = "name the output of peagle train"
        raise InputError("no metrics.jsonl there", field="run", value=run, fix=fix)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    if len(lines) < 2:
        raise InputError(f"{len(lines)} steps are too few to time", field="run", value=run)
    first = lines[(len(lines) - 1) // 2]
    last = lines[-1]
    answered = last["answer_tokens"] - first["answer_tokens"]
    return answered / max(last["seconds"] - first["seconds"], 1e-9)


def _loss_bytes(target: Target, spec: HeadSpec, elements: int, *, dense: bool) -> int:
    """Bytes of the gradients at the last hidden states and at the draft head, of the target's head
    over the draft vocabulary, and of a chunk's logits: the target's, the drafter's and their
    gradient, and what the loss makes in float32 of the rows that it compares together."""
    vocab, hidden = target.embedding.shape
    draft_vocab = min(spec.draft_vocab, vocab)
    gradients = elements * hidden * 4 + 2 * draft_vocab * hidden * 4
    head = draft_vocab * hidden * target.dtype.itemsize
    rows = LOSS_ROWS if dense else LOSS_LOGITS // draft_vocab
    compared = BLOCK if dense else rows
    return gradients + head + draft_vocab * (rows * 4 * 2 + compared * 4 * 4)


def _runtime() -> int:
    """Python and the libraries, as they are loaded now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
