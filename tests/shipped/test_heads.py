"""The heads in the repository with the real demo target (downloaded on first use)."""

from functools import cache

import pytest

from peagle import LLM, SamplingParams
from peagle.bench.native import side_by_side
from peagle.bench.summary import same
from peagle.bench.workload import human_eval
from peagle.data.chat import prompt_ids
from peagle.data.example import Example
from peagle.engine.drafting import Drafting
from peagle.engine.run import Completion
from peagle.heads.find import find_head
from peagle.heads.format import read_tensors
from peagle.heads.load import load_drafter, try_both
from peagle.model.loader import load_target
from peagle.model.target import Target
from peagle.train.walk import Round, Walk

TARGET = "smollm2-135m"
FOUND = [find_head(TARGET, method=method) for method in ("eagle3", "p-eagle")]
HEADS = {head.method: head.folder for head in FOUND if head}


@cache
def target(dtype: str) -> Target:
    return load_target(TARGET, dtype=dtype)


def prompts(count: int) -> list[list[int]]:
    tokenizer = target("float32").tokenizer
    asked = [[{"role": "user", "content": q}] for q in human_eval()[-count:]]
    return [prompt_ids(tokenizer, messages) for messages in asked]


def test_heads_are_small_enough_for_a_clone() -> None:
    files = [f for folder in HEADS.values() for f in folder.glob("*.safetensors")]
    assert sum(f.stat().st_size for f in files) <= 60_000_000
    assert max(f.stat().st_size for f in files) <= 16 * 2**20


@pytest.mark.parametrize("method", HEADS)
def test_head_stores_no_embedding_table_and_knows_its_target(method: str) -> None:
    names = read_tensors(HEADS[method])
    assert "embed_tokens.weight" not in names
    assert ("mask_embedding" in names) == (method == "p-eagle")
    llm = LLM(target("float32"), HEADS[method])
    assert llm.drafter.config.provenance.target == TARGET
    assert llm.drafter.config.depths >= 7


@pytest.mark.parametrize("method", HEADS)
def test_a_trial_finds_the_layers_that_a_head_was_trained_on(method: str) -> None:
    """Whether its ids count what enters a layer, or what leaves it."""
    drafter = load_drafter(HEADS[method], target("float32"))
    layers = drafter.config.feature_layers
    for ids in (layers, tuple(layer - 1 for layer in layers)):
        assert try_both(drafter, target("float32"), ids).layers == layers


def test_deterministic_bfloat16_is_identical_to_the_bit() -> None:
    llm = LLM(TARGET, dtype="bfloat16", max_batch=1, deterministic=True)  # as a user's is
    drafters = {Drafting(m, None, lookup=True): llm.load_head(HEADS[m]) for m in HEADS}
    params = SamplingParams(max_tokens=48)
    results = side_by_side(llm, drafters, human_eval()[-3:], params)
    assert [same(result, results[0])["same"] for result in results] == [3, 3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("method", HEADS)
def test_the_walk_of_training_counts_what_the_engine_accepts(method: str) -> None:
    """In float32, where both compute the same tokens."""
    llm = LLM(target("float32"), HEADS[method], k=7, max_batch=1)
    asked = prompts(3)
    answers = llm.generate(asked, SamplingParams(max_tokens=64))
    documents = [
        Example([*ids, *answer.token_ids], [False] * len(ids) + [True] * len(answer.token_ids))
        for ids, answer in zip(asked, answers, strict=True)
    ]
    walk = Walk(llm.target, documents)
    rounds = walk.rounds(llm.drafter, 7)
    assert counted(rounds) == decoded(answers)
    assert sum(accepted for _, accepted in counted(rounds)) > 50


def counted(rounds: list[list[Round]]) -> list[tuple[int, int]]:
    return [(len(each), sum(one.accepted for one in each)) for each in rounds]


def decoded(answers: list[Completion]) -> list[tuple[int, int]]:
    return [(answer.stats.rounds, sum(answer.drafted)) for answer in answers]
