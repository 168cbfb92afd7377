"""The target writes prompts and answers them; a stopped run goes on as if it never had been."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from json_files import read_lines
from refusals import refused
from stand_in import Answers, answering
from tiny import CHATML, make_target, make_tokenizer

from peagle.data.chat import PLAIN_STYLE, prompt_ids
from peagle.data.dataset import read_examples
from peagle.data.synth import MAX_REFUSED, STARTERS, SynthConfig, synthesize, user_turn
from peagle.engine.llm import LLM
from peagle.engine.params import RequestFailure, SamplingParams
from peagle.engine.request import Stats
from peagle.engine.run import Completion

TOKENIZER = make_tokenizer()
USER = SamplingParams(temperature=1.2, max_tokens=48)
CONFIG = SynthConfig(count=10, max_tokens=6, seed=1)


@pytest.fixture(autouse=True, scope="module")
def user() -> Iterator[None]:
    """User turns of a target that knows nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peagle.data.synth.USER", USER)
        yield


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(make_target(), max_batch=4)


@pytest.fixture(scope="module")
def made(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished file."""
    file = tmp_path_factory.mktemp("made") / "new" / "data.jsonl"
    assert synthesize(llm, file, CONFIG).written == 10
    return file


def test_records_are_written_by_the_target(llm: LLM, made: Path) -> None:
    records = read_lines(made)
    assert [record["record"] for record in records] == list(range(10))
    greedy = SamplingParams(max_tokens=6)
    for record in records:
        asked, said = record["messages"]
        assert record["prompt_ids"] == prompt_ids(llm.tokenizer, [asked])
        plain = llm.generate([record["prompt_ids"]], greedy)[0]
        assert (record["answer_ids"], said["content"]) == (plain.token_ids, plain.text)
        assert any(asked["content"].startswith(start) for start in STARTERS[record["kind"]])
        assert not any(special in asked["content"] for special in llm.tokenizer.all_special_tokens)
    assert len({record["messages"][0]["content"] for record in records}) == 10
    assert read_examples(made, llm.tokenizer, 256)


def test_draws_are_in_order_and_of_all_kinds(made: Path) -> None:
    draws = [record["draw"] for record in read_lines(made)]
    assert draws == sorted(set(draws))
    assert {record["kind"] for record in read_lines(made)} == set(STARTERS)


def test_a_kill_anywhere_loses_and_doubles_nothing(llm: LLM, made: Path, tmp_path: Path) -> None:
    cut, data = tmp_path / "cut.jsonl", made.read_bytes()
    ends = [at + 1 for at, byte in enumerate(data) if byte == ord("\n")]
    for size in (0, ends[2] - 1, ends[4] + 30, ends[7], len(data)):
        cut.write_bytes(data[:size])
        synthesize(llm, cut, CONFIG)
        assert cut.read_bytes() == data, size


@pytest.mark.parametrize("batch", [1, 16])
def test_batching_does_not_change_the_file(made: Path, tmp_path: Path, batch: int) -> None:
    synthesize(LLM(make_target(), max_batch=batch), tmp_path / "data.jsonl", CONFIG)
    assert (tmp_path / "data.jsonl").read_bytes() == made.read_bytes()


def test_a_larger_count_continues_and_is_reported(llm: LLM, tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    few, more = (SynthConfig(n, max_tokens=2) for n in (3, 6))
    file = tmp_path / "run" / "data.jsonl"
    synthesize(llm, file, few)
    before = file.read_bytes()
    report = synthesize(llm, file, more, lambda *at: progress.append(at))
    assert report.written == 3
    assert report.kinds.total() == 6
    assert file.read_bytes().startswith(before)
    assert progress[0] == (3, 6) and progress[-1] == (6, 6)
    assert synthesize(llm, file, few).written == 0


def test_records_of_other_settings_are_left_alone(llm: LLM, made: Path, tmp_path: Path) -> None:
    """Those with the same system prompt are known."""
    more, own = replace(CONFIG, count=11), tmp_path / "own.jsonl"
    brief = SynthConfig(1, max_tokens=2, system="be brief")
    written = [synthesize(llm, own, replace(brief, count=n)).written for n in (1, 2)]
    assert written == [1, 1]
    before = made.read_bytes()
    for other in (replace(more, system="be brief"), replace(more, template_args={"think": False})):
        with refused("output") as error:
            synthesize(llm, made, other)
        assert "another system prompt or template arguments" in error.value.why
    assert made.read_bytes() == before


def test_another_seed_gives_other_records(made: Path, llm: LLM, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    synthesize(llm, other, SynthConfig(count=3, max_tokens=6, seed=2))
    texts = [{r["messages"][0]["content"] for r in read_lines(f)} for f in (made, other)]
    assert not texts[0] & texts[1]


# --- drafts from a script ------------------------------------------------------------------------


def scripted(
    *said: str, template: str = CHATML, context: int = 4096, failure: str | None = None
) -> Any:
    """An engine whose user turns are `said`, in turn; an answer is always "yes", or fails."""
    tokenizer, turns, asked = make_tokenizer(template), iter(said), list[list[int]]()

    def completion(text: str) -> Completion:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        shown = tokenizer.decode(ids, skip_special_tokens=True)
        return Completion(shown, ids, "stop", Stats(), [], failure=failure)

    def generate(prompts: list[list[int]], _: Any) -> list[Completion]:
        asked.extend(prompts)
        return [completion(next(turns, said[-1])) for _ in prompts]

    def answer(prompts: list[list[int]], _: Any) -> Answers:
        return enumerate(completion("yes<|im_end|>") for _ in prompts)

    llm = answering(tokenizer, context, answer)
    llm.target.name, llm.target.tokenizer = "scripted", tokenizer
    llm.target.end_tokens = {tokenizer.eos_token_id}
    llm.generate, llm.asked = generate, asked
    return llm


LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"


@pytest.mark.parametrize(
    ("draft", "why"),
    [
        ("no end of this turn", "unfinished"),
        ("the <|reserved_0|> cat sat<|im_end|>", "special token"),
        ("a<|im_end|>", "too short"),
        ("?!?!?!?!<|im_end|>", "empty"),
        ("the cat ran to the hat " * 4 + "<|im_end|>", "repetitive"),
        (f"{LONG}<|im_end|>", "duplicate"),
        (f"{LONG.upper().replace(' ', ',  ')}?<|im_end|>", "duplicate"),
    ],
)
def test_drafts_that_are_not_used(tmp_path: Path, draft: str, why: str) -> None:
    llm = scripted(f"{LONG}<|im_end|> and more<|im_end|>", draft, "what a fine day it is<|im_end|>")
    # Of all starters only the empty one, so that the script is all there is.
    config = SynthConfig(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peagle.data.synth.STARTERS", dict.fromkeys(STARTERS, ("",)))
        report = synthesize(llm, tmp_path / "data.jsonl", config)
    assert report.refused == {why: 1}
    texts = [record["messages"][0]["content"] for record in read_lines(tmp_path / "data.jsonl")]
    assert texts == [LONG, "what a fine day it is"]


def test_a_prompt_that_leaves_no_room_for_an_answer(tmp_path: Path) -> None:
    llm = scripted(f"{LONG}<|im_end|>", "what a fine day it is<|im_end|>", context=100)
    report = synthesize(llm, tmp_path / "data.jsonl", SynthConfig(1))
    assert report.refused == {"too long": 1}


def test_an_answer_that_fails_ends_the_run(tmp_path: Path) -> None:
    llm = scripted("what a fine day it is<|im_end|>", failure="NaN")
    with pytest.raises(RequestFailure, match="NaN"):
        synthesize(llm, tmp_path / "data.jsonl", SynthConfig(1))


def test_nothing_usable_ends_the_run_and_keeps_what_there_is(tmp_path: Path) -> None:
    llm, output = (
        scripted("what a fine day it is<|im_end|>", "", "b<|im_end|>", ""),
        tmp_path / "data.jsonl",
    )
    with refused("target") as error:
        synthesize(llm, output, SynthConfig(5))
    for part in ("1 too short", "unfinished", f"1 records are kept in {output}"):
        assert part in error.value.why
    assert len(llm.asked) < MAX_REFUSED + 10
    assert len(read_lines(output)) == 1


# --- where a user speaks -------------------------------------------------------------------------

CHATML = TOKENIZER.chat_template
MISTRAL = "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"


def test_the_cut_of_a_template_with_special_tokens() -> None:
    turn = user_turn(TOKENIZER, [], PLAIN_STYLE, {99})
    assert turn.start == "<|im_start|>user\n"
    assert (turn.end_ids, turn.end_text) == ({99, TOKENIZER.eos_token_id}, None)


def test_a_turn_that_does_not_end_with_an_end_of_text(tmp_path: Path) -> None:
    """GPT-OSS ends a user's turn with a token that does not end an answer."""
    template = CHATML.replace("<|im_end|>", "<|reserved_0|>")
    llm = scripted("what a fine day it is<|reserved_0|>\nassistant", template=template)
    synthesize(llm, tmp_path / "data.jsonl", SynthConfig(1))
    [record] = read_lines(tmp_path / "data.jsonl")
    assert record["messages"][0]["content"].endswith("what a fine day it is")


def test_a_turn_that_ends_with_ordinary_text(tmp_path: Path) -> None:
    llm = scripted(" what a fine day it is [/INST] yes", template=MISTRAL)
    turn = user_turn(llm.tokenizer, [], PLAIN_STYLE, {2})
    assert turn == ("[INST] ", {2}, "[/INST]")
    synthesize(llm, tmp_path / "data.jsonl", SynthConfig(1))
    [record] = read_lines(tmp_path / "data.jsonl")
    text = record["messages"][0]["content"]
    assert text.endswith("what a fine day it is")
    assert llm.tokenizer.decode(record["prompt_ids"]) == f"[INST] {text} [/INST]"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "<s>{% for m in messages %}{{ m.role }}{% endfor %}</s>",
        CHATML + "{{ messages[0].content }}<|im_end|>",
        CHATML.replace("m['content']", "m['content'] | upper"),
    ],
)
def test_templates_that_cannot_be_cut(template: str) -> None:
    tokenizer = make_tokenizer(template)
    with refused("chat_template"):
        user_turn(tokenizer, [], PLAIN_STYLE, {2})


# --- what users get wrong ------------------------------------------------------------------------


def test_a_system_prompt_that_is_no_unicode(llm: LLM, tmp_path: Path) -> None:
    """The command line has a byte that is no UTF-8."""
    with refused():
        synthesize(llm, tmp_path / "data.jsonl", SynthConfig(1, system="caf\udce9"))


def test_wrong_settings() -> None:
    with refused("count"):
        SynthConfig(0)


@pytest.mark.parametrize(
    "foreign",
    [
        '{"record": 0, "messages": [], "prompt_ids": [1], "answer_ids": [2]}\n',  # regenerate's
        '{"record": 0, "kind": "chat", "draw": 0, "messages": []}\n',
        '{"turns": ["hi"]}\n',
        "text",
    ],
)
def test_another_file_is_left_as_it_was(llm: LLM, tmp_path: Path, foreign: str) -> None:
    output = tmp_path / "mine.jsonl"
    output.write_text(foreign)
    with refused("output"):
        synthesize(llm, output, CONFIG)
    assert output.read_text() == foreign
