"""The comparison with vLLM, an interpreter that plays vLLM's part in its place.

`tests/vllm` asks the real one.
"""

import json
import sys
from pathlib import Path

import pytest
from tiny import make_drafter, make_target, random_prompts

from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.methods.checkpoint import read_config
from peagle.methods.keys import default_k
from peagle.methods.validate import Problem, Skipped
from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.vllm.parity import MAX_TOKENS, compare_with_vllm

PROMPT = random_prompts(1, 12, seed=4)[0]
STAND_IN = """#!{python}
import json, pathlib, shutil, sys
here = pathlib.Path(__file__).parent
llm = json.loads(sys.argv[2])
shutil.copytree(llm["speculative_config"]["model"], here / "head")
request = json.loads(sys.stdin.readline())
(here / "asked.json").write_text(json.dumps({{"llm": llm, **request}}))
answer = here / "answer.json"
if not answer.exists():
    sys.exit("ValueError: no such architecture")
print(answer.read_text())
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    target = make_target()
    folder = tmp_path_factory.mktemp("target")
    target.model.save_pretrained(folder)
    target.name = str(folder)
    return target


@pytest.fixture(scope="module")
def drafter(target: Target) -> Drafter:
    return make_drafter(target, "p-eagle")


class StandIn:
    """An interpreter whose vLLM gives the answer it is told."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.python = folder, folder / "python"
        self.python.write_text(STAND_IN.format(python=sys.executable))
        self.python.chmod(0o755)

    def answers(self, tokens: list[int], rounds: int, accepted: list[int]) -> None:
        counters = {
            "vllm:spec_decode_num_drafts": rounds,
            "vllm:spec_decode_num_accepted_tokens_per_pos": accepted,
        }
        reply = {"token_ids": [tokens], "files": [None], "counters": counters}
        (self.folder / "answer.json").write_text(json.dumps(reply))


@pytest.fixture
def stand_in(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path)


def ours(target: Target, drafter: Drafter) -> tuple[list[int], int, list[int]]:
    llm = LLM(target, drafter, k=default_k(drafter.config), max_batch=1)
    [said] = llm.generate([PROMPT], SamplingParams(max_tokens=MAX_TOKENS))
    return said.token_ids, said.stats.rounds, said.stats.accepted


def test_the_same_answer_passes(target: Target, drafter: Drafter, stand_in: StandIn) -> None:
    tokens, rounds, accepted = ours(target, drafter)
    stand_in.answers(tokens, rounds, accepted)
    found = compare_with_vllm(stand_in.python, drafter, target, PROMPT)
    assert f"the same {len(tokens)} tokens" in found
    asked = json.loads((stand_in.folder / "asked.json").read_text())
    assert asked["prompts"] == [PROMPT] and asked["llm"]["model"] == target.name
    assert asked["llm"]["speculative_config"]["parallel_drafting"] is True
    assert asked["llm"]["dtype"] == "float32"
    assert read_config(stand_in.folder / "head").embedding == "full", "vLLM wants the table"


def test_another_token_is_named(target: Target, drafter: Drafter, stand_in: StandIn) -> None:
    tokens, rounds, accepted = ours(target, drafter)
    stand_in.answers([*tokens[:3], (tokens[3] + 1) % 128, *tokens[4:]], rounds, accepted)
    with pytest.raises(Problem, match="as token 3, not"):
        compare_with_vllm(stand_in.python, drafter, target, PROMPT)


def test_an_answer_that_ends_early_is_named(
    target: Target, drafter: Drafter, stand_in: StandIn
) -> None:
    tokens, rounds, accepted = ours(target, drafter)
    stand_in.answers(tokens[:-1], rounds, accepted)
    with pytest.raises(Problem, match=rf"outputs \[\] as token {len(tokens) - 1}"):
        compare_with_vllm(stand_in.python, drafter, target, PROMPT)


def test_other_acceptance_is_named(target: Target, drafter: Drafter, stand_in: StandIn) -> None:
    tokens, rounds, accepted = ours(target, drafter)
    stand_in.answers(tokens, rounds, [count + 9 for count in accepted])
    with pytest.raises(Problem, match="but acceptance lengths are"):
        compare_with_vllm(stand_in.python, drafter, target, PROMPT)


def test_a_failure_is_named(target: Target, drafter: Drafter, stand_in: StandIn) -> None:
    with pytest.raises(Problem, match="vLLM ended with code 1: ValueError: no such arch"):
        compare_with_vllm(stand_in.python, drafter, target, PROMPT)


def test_without_an_interpreter_it_is_skipped(target: Target, drafter: Drafter) -> None:
    with pytest.raises(Skipped, match="named with `vllm_python`"):
        compare_with_vllm(None, drafter, target, PROMPT)
