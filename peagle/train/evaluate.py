"""Measuring the head that is being trained as it will be served: the engine decodes with it."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch.distributed.tensor import DTensor

from peagle.backends.torch import TorchBackend
from peagle.data.example import Example
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Stats
from peagle.methods.keys import default_k
from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.train.sharding import whole_copy

MAX_BATCH = 8  # prompts decoded together: a larger KV cache would take memory from training
MAX_TOKENS = 64  # of an answer


class HeldOut(NamedTuple):
    """Documents to train on, and prompts kept from training."""

    train: list[Example]
    prompts: list[list[int]]


def hold_out(data: list[Example], prompts: int) -> HeldOut:
    """Keep the prompts of the last documents from training; at most a tenth of the documents.

    Prompts that occur among the documents trained on are not used.
    """
    count = min(prompts, len(data) // 10)
    train, rest = (data[:-count], data[-count:]) if count else (data, [])
    seen = {tuple(prompt_of(example)) for example in train}
    return HeldOut(train, [p for p in map(prompt_of, rest) if p and tuple(p) not in seen])


def prompt_of(example: Example) -> list[int]:
    """Ids before the first answer."""
    return example.ids[: example.supervised.index(True)]


def measure_on(target: Target, prompts: list[list[int]]) -> Callable[[Drafter], Stats] | None:
    """What a `Trainer` measures heads with; None without prompts."""
    return partial(acceptance, target, prompts) if prompts else None


def acceptance(target: Target, prompts: list[list[int]], drafter: Drafter) -> Stats:
    """Decode prompts greedily with a copy of the drafter in the target's dtype. What is sharded is
    gathered: then all processes call this together."""
    # A sharded target gathers its weights in its own forward.
    backend = TorchBackend() if _is_sharded(target) else None
    copied = whole_copy(drafter, target.dtype)
    k = default_k(drafter.config)
    llm = LLM(target, copied, k=k, max_batch=MAX_BATCH, backend=backend)
    room = target.max_context - MAX_TOKENS
    fitting = [prompt for prompt in prompts if len(prompt) <= room]
    answers = llm.generate(fitting, SamplingParams(max_tokens=MAX_TOKENS))
    return sum((answer.stats for answer in answers), Stats())


def _is_sharded(target: Target) -> bool:
    """Whether `shard` has spread the target's weights."""
    return any(isinstance(weight, DTensor) for weight in target.layers.parameters())
