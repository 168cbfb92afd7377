"""RoPE whose frequencies follow the longest request (dynamic, LongRoPE): they are fixed at load, so
that no row depends on the requests beside it."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import PLAIN, build, close, random_ids
from refusals import refused
from tiny import make_tokenizer
from tiny_heads import head_config, make_head
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config, PretrainedConfig

from peagle.backends.batch import Batch, Span
from peagle.backends.choose import choose_backend
from peagle.backends.kv_cache import KVCache
from peagle.backends.torch import TorchBackend
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.model.attention import CausalAttend
from peagle.model.loader import load_target
from peagle.model.target import Target
from peagle.train.batches import PackedDocuments
from peagle.train.passes import run_target

SHORT, LONG = 12, 40  # tokens of two requests
CONTEXT = 16  # the longest request with the short one's frequencies
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [4.0, 5.0, 6.0, 7.0], "original_max_position_embeddings": CONTEXT,
}  # fmt: skip
SHORTER, LONGER = (PLAIN | {"max_position_embeddings": most} for most in (CONTEXT, 64))
WINDOWED = {"rope_type": "default", "rope_theta": 100.0}
# Each with the longest sequence that transformers runs at fixed frequencies.
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "dynamic": lambda: LlamaConfig(**SHORTER, rope_parameters=dict(DYNAMIC)),
    "longrope": lambda: LlamaConfig(**LONGER, rope_parameters=dict(LONGROPE)),
    "phi3": lambda: Phi3Config(
        **LONGER, rope_parameters=dict(LONGROPE), original_max_position_embeddings=CONTEXT
    ),
    "by kind of layer": lambda: Gemma3TextConfig(
        **SHORTER, head_dim=8, layer_types=MIXED,
        rope_parameters={"full_attention": dict(DYNAMIC), "sliding_attention": WINDOWED},
    ),
    "longrope by kind of layer": lambda: Gemma3TextConfig(
        **LONGER, head_dim=8, layer_types=MIXED,
        rope_parameters={"full_attention": dict(LONGROPE), "sliding_attention": WINDOWED},
    ),
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention"] * 2


@pytest.fixture(params=CONFIGS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(name: str) -> Target:
    return Target(build(CONFIGS[name]()), make_tokenizer(), name)


def test_the_context_is_that_of_the_fixed_frequencies(name: str) -> None:
    assert make(name).max_context == CONTEXT


@pytest.mark.parametrize("length", [1, SHORT, CONTEXT])
def test_within_its_context_it_is_the_model_itself(name: str, length: int) -> None:
    ids = random_ids(length)
    with torch.no_grad():
        wanted = build(CONFIGS[name]())(ids[None], use_cache=False).logits[0]
    target = make(name)
    close(target.logits(target.forward(ids, torch.arange(length), CausalAttend()).hidden), wanted)


@pytest.mark.parametrize("chosen", [False, True])
def test_a_row_does_not_depend_on_a_longer_request(name: str, chosen: bool) -> None:
    target = make(name)
    backend = choose_backend(target.device, target.dtype) if chosen else TorchBackend()
    model = backend.target(target)
    short = Span([0], 0, random_ids(SHORT).tolist())
    long = Span([1, 2, 3], 0, random_ids(LONG, 1).tolist())

    def features(*spans: Span) -> Tensor:
        cache = KVCache(4, target.kv_shapes, target.dtype, target.device)
        return model.forward(Batch.of(spans), cache, (1, 4)).features[:SHORT].clone()

    alone = features(short)
    close(features(short, long), alone)
    close(features(short), alone)


def test_training_computes_the_same(name: str) -> None:
    target = make(name)
    ids = torch.cat([random_ids(SHORT), random_ids(LONG, 1)])
    documents = (torch.arange(SHORT + LONG) >= SHORT).long()
    both = run_target(target, PackedDocuments(ids, documents.bool(), documents), (1, 4))
    alone = target.forward(ids[:SHORT], torch.arange(SHORT), CausalAttend(), (1, 4))
    close(both.features[:SHORT], alone.features)
    close(both.hidden[:SHORT], alone.hidden)


@pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_a_head_does_not_depend_on_its_longest_request(rope: dict[str, object]) -> None:
    sizes = {"rope_parameters": dict(rope), "max_position_embeddings": CONTEXT}
    head = make_head(head_config("eagle3", sizes=sizes))
    features = torch.randn(SHORT, 32, generator=torch.Generator().manual_seed(0))
    ids = random_ids(SHORT)

    def run(*positions: int) -> Tensor:
        rows = torch.tensor(positions)
        return head(ids[: len(rows)], features[: len(rows)], rows, CausalAttend()).normed

    with torch.no_grad():
        alone = run(*range(SHORT - 1))
        close(run(*range(SHORT - 1), LONG)[:-1], alone)
        close(run(*range(SHORT - 1)), alone)


def test_longer_requests_are_refused_by_name(name: str) -> None:
    llm, params = LLM(make(name), max_batch=2), SamplingParams(max_tokens=64, ignore_eos=True)
    with refused("prompt[0]"):
        llm.generate([random_ids(CONTEXT).tolist()], params)
    [done] = llm.generate([random_ids(SHORT).tolist()], params)
    assert len(done.token_ids) == CONTEXT - SHORT


@pytest.mark.parametrize(("name", "lines"), [("longrope", 1), ("dynamic", 0)])
def test_a_shorter_context_is_told(
    name: str, lines: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build(CONFIGS[name]()).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "peagle"):
        assert load_target(str(tmp_path), device="cpu").max_context == CONTEXT
    assert len(caplog.records) == lines
    assert all("context 16, not 64" in record.getMessage() for record in caplog.records)
