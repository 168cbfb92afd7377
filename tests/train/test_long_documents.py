"""Memory of training is linear in the length of a document, whatever the target's attention."""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from peagle.model.attention import AttentionSpec, CausalAttend, attention, causal_mask

# Peak memory, in MiB, that a step over documents of some lengths adds, one after another, and the
# bytes of its largest tensor.
STEP = """
import resource, sys
from pathlib import Path
import torch
tests = Path(sys.argv[1])
sys.path[:0] = [str(tests), str(tests / "train")]
from families import FAMILIES, build
from largest_tensor import Largest
from tiny import make_tokenizer
from peagle.data.example import Example
from peagle.model.target import Target
from peagle.train.config import TrainConfig
from peagle.train.spec import HeadSpec
from peagle.train.trainer import Trainer
from peagle.train.warm_start import new_drafter

config = FAMILIES[sys.argv[2]]()
config.max_position_embeddings = 1 << 15
config.vocab_size = 128
target = Target(build(config), make_tokenizer(), "tiny")
spec = HeadSpec(layers=1, depths=4, draft_vocab=32, feature_layers=(1, 2, 3), embedding="full")
for length in map(int, sys.argv[3:]):
    ids = torch.randint(3, 60, (length,)).tolist()
    drafter = new_drafter(target, [ids[:9]], spec)
    data = [Example(ids, [True] * length)]
    trainer = Trainer(TrainConfig(Path(), segments=1), target, drafter, data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Largest() as largest:
        work = trainer._sample()
        trainer._forward_backward(work, trainer._reduce_counts(work))
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, largest.size)
"""


class Added(NamedTuple):
    """The memory of a step."""

    peak: int  # MiB
    largest: int  # bytes


def added(family: str, *lengths: int) -> list[Added]:
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-c", STEP, str(tests), family, *map(str, lengths)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return [Added(*map(int, line.split())) for line in run.stdout.splitlines()]


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_memory_is_linear(family: str) -> None:
    """A table of all pairs has 16 million entries, of a byte at least."""
    first, second = added(family, 2000, 4000)
    assert second.largest < 4000**2, second
    assert second.peak < 3 * max(first.peak, 20), (first, second)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_20000_tokens_are_trained(family: str) -> None:
    """One table of all pairs has 400 million entries."""
    _, step = added(family, 2000, 20_000)
    assert step.largest < 20_000**2 and step.peak < 1500, step


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("kind", ["plain", "sinks", "softcap"])
def test_blocks_of_rows_equal_the_dense_form(kind: str, window: int | None) -> None:
    """4,096 tokens in float32, as GPT-OSS and Gemma 2 have layers."""
    tokens, heads = 4096, 4
    q, k, v = (draw(tokens, n, 16, seed=n) for n in (heads, 2, 1))
    more = {"sinks": {"sinks": draw(heads, seed=0)}, "softcap": {"softcap": 2.0}}
    spec = AttentionSpec(0.25, window, **more.get(kind, {}))
    v = v.expand(-1, 2, -1)
    mask = causal_mask(0, tokens, window, q.device)
    found = CausalAttend()(0, q, k, v, spec)
    torch.testing.assert_close(found, attention(q, k, v, mask, spec), rtol=1e-5, atol=1e-5)
