"""vLLM and our engine decode with the shipped heads alike: the same tokens, the same acceptance.

`make test-vllm` runs this. vLLM lives in an environment of its own, whose python
PEAGLE_VLLM_PYTHON names.
"""

import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

from peagle.bench.workload import human_eval
from peagle.catalog import PARALLEL_METHODS
from peagle.data.chat import prompt_ids
from peagle.engine.corrected import CorrectedScores
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Stats
from peagle.engine.tree import Ranked
from peagle.heads.find import find_head
from peagle.heads.load import load_drafter
from peagle.heads.save import save_drafter
from peagle.model.drafter import Drafter
from peagle.model.loader import locate
from peagle.train.processes import rebuilt
from peagle.vllm.flags import speculative_config

pytestmark = pytest.mark.vllm

TARGET = "smollm2-135m"
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PROMPTS, PROBLEMS = 20, 164
MAX_TOKENS = 128
DEPTHS = {"p-eagle": 5, "eagle3": 3}  # K
BATCH = 8
WINDOW = 64  # positions; every prompt is longer


class Outcome(NamedTuple):
    """Counts of one engine's run."""

    token_ids: list[list[int]]
    acceptance_length: float
    accepted_per_position: list[float]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(TARGET, dtype="float32", max_batch=BATCH)


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    questions = human_eval()[-PROBLEMS:][:PROMPTS]
    return [prompt_ids(llm.tokenizer, [{"role": "user", "content": q}]) for q in questions]


def shipped(llm: LLM, method: str) -> Drafter:
    head = find_head(TARGET, method=method)
    assert head is not None, f"the repository has no {method} head for {TARGET}"
    return load_drafter(head.folder, llm.target)


def run_ours(
    llm: LLM, drafter: Drafter, prompts: list[list[int]], max_tokens: int = MAX_TOKENS
) -> Outcome:
    used = llm.use(drafter, DEPTHS[drafter.config.method])
    answers = used.generate(prompts, SamplingParams(max_tokens=max_tokens))
    stats = sum((answer.stats for answer in answers), Stats())
    tokens = [answer.token_ids for answer in answers]
    return Outcome(tokens, stats.acceptance_length, stats.accepted_per_position)


def run_vllm(
    python: str, head: Path, method: str, prompts: list[list[int]], plugin: str, **flags: bool
) -> Outcome:
    """One vLLM process, with our plugin or without any. `flags`: more of its arguments."""
    parallel = method in PARALLEL_METHODS
    start = {
        "model": locate(TARGET)[0],
        "speculative_config": speculative_config(parallel, str(head), DEPTHS[method]),
        "dtype": "float32",
        "max_num_seqs": BATCH,
        "max_model_len": 1024,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        **flags,
    }
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    peer = import_module("peers").vllm_peer(python, threads, plugin)
    request = {"start": start, "prompts": prompts, "max_tokens": MAX_TOKENS, "concurrency": BATCH}
    answer = peer.ask(request)
    peer.close()
    return Outcome(*(answer[field] for field in Outcome._fields))


def unlike(ours: Outcome, theirs: Outcome) -> list[str]:
    """Differences of acceptance: length by over 1 %, a position by over one point."""
    found = []
    if abs(ours.acceptance_length / theirs.acceptance_length - 1) > 0.01:
        found.append(f"length {ours.acceptance_length:.4f} {theirs.acceptance_length:.4f}")
    shares = zip(ours.accepted_per_position, theirs.accepted_per_position, strict=True)
    for position, (our, their) in enumerate(shares):
        if abs(our - their) > 0.01:
            found.append(f"position {position}: {our:.4f} {their:.4f}")
    return found


@pytest.fixture
def compared(tmp_path, capsys, monkeypatch) -> tuple:
    """pytest's fixtures that the comparison needs, and what finds first differences and ties."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return tmp_path, capsys, monkeypatch, import_module("lossless").differences


class LaterPlaces(CorrectedScores):
    """Corrected but for the first place, as our plugin drafts."""

    def after(self, row: int, token: int) -> Ranked:
        if self.depths[row] > 0:
            return super().after(row, token)
        prob = self.candidates.logits[row, 0].exp().item()
        return Ranked(self.tokens[row][:1], [prob], 0, self.chance)


@pytest.mark.parametrize("method", DEPTHS)
def test_a_window_that_contexts_outgrow(compared, llm, prompts, vllm_python, method):
    tmp_path, *_ = compared
    head = shipped(llm, method)
    sizes = replace(head.config.transformer, sliding_window=WINDOW)
    plain = replace(head.config, transformer=sizes, correction=None)
    drafter = rebuilt(head, plain, head.state_dict()).eval()
    save_drafter(drafter, tmp_path / "head", "vllm")
    ours = run_ours(llm, drafter, prompts)
    whole = {"disable_hybrid_kv_cache_manager": True}  # as `peagle serve` and `deploy` start it
    theirs = run_vllm(vllm_python, tmp_path / "head", method, prompts, "", **whole)
    assert ours.token_ids == theirs.token_ids and unlike(ours, theirs) == []
    assert unlike(ours, run_ours(llm, head, prompts)), "the window matters"


@pytest.mark.parametrize(
    ("method", "plugin"),
    [("p-eagle", ""), ("p-eagle", "peagle"), ("eagle3", "peagle")],
    ids=["p-eagle", "corrected", "eagle3"],
)
def test_vllm_says_and_accepts_the_same(compared, llm, prompts, vllm_python, method, plugin):
    """The same head without the plugin and with it; the plugin changes no other head."""
    tmp_path, capsys, monkeypatch, differences = compared
    drafter = shipped(llm, method)
    save_drafter(drafter, tmp_path / "head", "vllm")
    if plugin:
        monkeypatch.setattr("peagle.engine.draft.CorrectedScores", LaterPlaces)
    else:
        plain = replace(drafter.config, correction=None)
        drafter = rebuilt(drafter, plain, drafter.state_dict()).eval()
    ours = run_ours(llm, drafter, prompts)
    theirs = run_vllm(vllm_python, tmp_path / "head", method, prompts, plugin)
    differing = differences(llm.target, prompts, ours.token_ids, theirs.token_ids)
    lengths = f"{ours.acceptance_length:.4f}, vLLM {theirs.acceptance_length:.4f}"
    said = f"{len(differing)} of {PROMPTS} prompts differ"
    title = f"{method}{plugin and ', plugin'}, K = {DEPTHS[method]}: AL {lengths}; {said}"
    with capsys.disabled():
        print("", title, *differing, sep="\n", flush=True)
    assert [d for d in differing if not d.tie] == []
    assert unlike(ours, theirs) == []


def tap_the_next_layer(drafter: Drafter) -> None:
    *others, last = drafter.config.feature_layers
    drafter.config = replace(drafter.config, feature_layers=(*others, last + 1))


def lose_the_mask_state(drafter: Drafter) -> None:
    drafter.mask_hidden.data.zero_()


MISTAKES = {"p-eagle": (tap_the_next_layer, lose_the_mask_state), "eagle3": (tap_the_next_layer,)}


@pytest.mark.parametrize("method", DEPTHS)
def test_a_mistake_would_be_seen(method, llm, prompts, vllm_python):
    few = prompts[:4]
    right = run_ours(llm, shipped(llm, method), few, max_tokens=64)
    for mistake in MISTAKES[method]:
        drafter = shipped(llm, method)
        mistake(drafter)
        assert unlike(right, run_ours(llm, drafter, few, max_tokens=64)), mistake.__name__
