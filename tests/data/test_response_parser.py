"""Answers in GPT-OSS's format: thoughts, text and calls, and back through the template."""

from functools import partial
from pathlib import Path

import pytest
import thinking
from json_files import read_lines
from stand_in import Answers, answering
from tiny import make_tokenizer

from peagle.data.chat import Message, encode_documents, prompt_ids, to_message, to_messages
from peagle.data.dataset import read_conversations, read_examples
from peagle.data.regenerate import regenerate
from peagle.engine.params import SamplingParams
from peagle.engine.request import Stats
from peagle.engine.run import Completion

# As GPT-OSS's: thoughts are shown for the last answer only, which ends otherwise than the others.
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' and m.tool_calls %}"
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json"
    "<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' and loop.last and not add_generation_prompt %}"
    "{% if 'thinking' in m %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>"
    "{% elif m.role == 'assistant' %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
ASKED = [{"role": "user", "content": "the cat?"}]
FINAL = "<|channel|>final<|message|>it sat<|return|>"
THOUGHT = f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{FINAL}"
CALL = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "mat"}<|call|>'


TOKENIZER = thinking.harmony(TEMPLATE)
ids = partial(thinking.ids, TOKENIZER)


def message(answer: str) -> Message:
    return to_message(TOKENIZER, prompt_ids(TOKENIZER, ASKED), ids(answer), "as it is")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (FINAL, {"content": "it sat"}),
        (THOUGHT, {"content": "it sat", "thinking": "hm"}),
        ("<|channel|>final <|constrain|>json<|message|>7<|return|>", {"content": "7"}),
        ("<|channel|>commentary<|message|>so<|end|><|start|>assistant" + FINAL,
         {"content": "so\nit sat"}),
        ("<|channel|>analysis<|message|>it is cu", {"content": "", "thinking": "it is cu"}),
    ],
)  # fmt: skip
def test_channels(answer: str, expected: Message) -> None:
    assert message(answer) == {"role": "assistant", **expected}


@pytest.mark.parametrize(
    "answer", [CALL, " to=functions.look<|channel|>commentary json<|message|>" + CALL[-21:]]
)
def test_calls(answer: str) -> None:
    assert answer.endswith('{"at": "mat"}<|call|>')
    [call] = message(answer)["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": {"at": "mat"}}


@pytest.mark.parametrize("arguments", ["{a", '{"at": NaN}', pytest.param("[" * 99_999, id="deep")])
def test_an_answer_that_breaks_the_format_stays_text(arguments: str) -> None:
    broken = CALL.replace('{"at": "mat"}', arguments)
    assert message(broken) == {"role": "assistant", "content": "as it is"}


def test_half_of_a_character_in_a_call(tmp_path: Path) -> None:
    """JSON can escape it. No file can hold it, nor can the next prompt."""
    half = CALL.replace("mat", "\\ud83d mat")
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"turns": ["the cat?", "and then"]}\n')
    said = iter([half, FINAL])

    def generate(rows: list[list[int]], params: SamplingParams) -> Answers:
        return enumerate(Completion("so", ids(next(said)), "stop", Stats(), []) for _ in rows)

    llm = answering(TOKENIZER, 512, generate)
    params = SamplingParams(max_tokens=32)
    assert regenerate(llm, read_conversations(prompts), output, params).answers == 2
    first, second = read_lines(output)
    assert first["answer_ids"] == ids(half)
    [call] = second["messages"][1]["tool_calls"]
    assert call["function"]["arguments"] == {"at": "\N{REPLACEMENT CHARACTER} mat"}


def test_other_models_speak_plainly() -> None:
    plain = make_tokenizer()
    assert to_message(plain, [], [70], "as it is") == {"role": "assistant", "content": "as it is"}


def test_every_answer_is_trained_on_as_it_was_written() -> None:
    """Thoughts and end of the last answer are not those of the same answer further up."""
    first = {"role": "assistant", "content": "it sat", "reasoning_content": "hm"}
    second = {"role": "assistant", "content": "it ran"}
    talk = [*ASKED, first, {"role": "user", "content": "and then"}, second]
    documents = encode_documents(TOKENIZER, to_messages({"messages": talk}))
    said = [
        TOKENIZER.decode([i for i, mine in zip(*document, strict=True) if mine])
        for document in documents
    ]
    assert said == [THOUGHT, "<|channel|>final<|message|>it ran<|return|>"]
    assert "analysis" not in TOKENIZER.decode(documents[1].ids)


def test_a_conversation_continues_after_an_answer(tmp_path: Path) -> None:
    """The next turn is asked behind the answer as the template writes it, not behind its marks."""
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"turns": ["the cat?", "and then"]}\n')
    asked: list[list[int]] = []

    def generate(rows: list[list[int]], params: SamplingParams) -> Answers:
        asked.extend(rows)
        return enumerate(Completion("hmit sat", ids(THOUGHT), "stop", Stats(), []) for _ in rows)

    llm = answering(TOKENIZER, 512, generate)
    regenerate(llm, read_conversations(prompts), output, SamplingParams(max_tokens=32))
    assert TOKENIZER.decode(asked[1]) == (
        "<|start|>user<|message|>the cat?<|end|><|start|>assistant<|channel|>final<|message|>it sat"
        "<|end|><|start|>user<|message|>and then<|end|><|start|>assistant"
    )
    first = read_examples(output, TOKENIZER, 512)[0]
    assert first.ids == asked[0] + ids(THOUGHT)
