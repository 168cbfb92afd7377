"""A grammar begins after the thoughts, which none restrains."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from thinking import OTHER, QWEN3, R1, byte_fallback, byte_level, harmony, ids, say
from thinking import thinking_target as target_of
from tiny import CHATML, chain, make_drafter

from peagle.data.chat import PLAIN_STYLE, Style, prompt_ids
from peagle.engine.grammar import Matcher
from peagle.engine.grammars import Grammars
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.model.thoughts import find_thoughts

# As GLM 4.5: a line break is before thoughts, and the prompt has none.
GLM = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}"
    "<think>{{ m.reasoning_content or '' }}</think>\n{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{{ '\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}"
    "{% endif %}"
)
# As DeepSeek's V3.1: prompts say </think> where nothing is thought, and <think> where it is.
V31 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<Assistant></think>"
    "{{ m.content.split('</think>')[-1] }}<end>{% else %}<User>{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<Assistant>"
    "{{ '<think>' if enable_thinking is defined and enable_thinking else '</think>' }}{% endif %}"
)
# As Gemma 4: thoughts are a channel, and an empty one where they are not asked for.
GEMMA = (
    "{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content.split('<channel|>')[-1] }}<turn|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn>model\n"
    "{% if not (enable_thinking is defined and enable_thinking) %}<|channel>thought\n<channel|>"
    "{% endif %}{% endif %}"
)
# As MiniMax M2, without a space: the prompt begins the thoughts that the template shows.
BEGUN = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "<think>{{ m.reasoning_content or '' }}</think>{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)

ASKED = [{"role": "user", "content": "the <think> cat"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [1, 22]}}}
SCHEMA |= {"required": ["a"], "additionalProperties": False}
SCHEMA |= {"x-guidance": {"whitespace_flexible": False}}
JSON = SamplingParams(json_schema=SCHEMA, max_tokens=120)
OFF, ON = (Style(None, {"enable_thinking": wanted}) for wanted in (False, True))
END = "<|im_end|>"
Make = Callable[..., Any]  # of a tokenizer
Answer = Callable[..., str]
both = pytest.mark.parametrize("make", [byte_level, byte_fallback])


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """The answer of a target that prefers the tokens of a script, special tokens included."""

    def answered(tokenizer: Any, script: str, style: Style = PLAIN_STYLE) -> str:
        say(monkeypatch, ids(tokenizer, script))
        llm = LLM(target_of(tokenizer), max_batch=1, kv_tokens=512)
        [done] = llm.generate([prompt_ids(tokenizer, ASKED, style)], JSON)
        return tokenizer.backend_tokenizer.decode(done.token_ids, skip_special_tokens=False)

    return answered


def is_json(text: str) -> bool:
    return json.loads(text.removesuffix(END))["a"] in (1, 22)


def is_json_after(thoughts: str, said: str) -> bool:
    return said.startswith(thoughts) and is_json(said.removeprefix(thoughts))


@pytest.mark.parametrize("marks", ["added", "special", "text"])
@both
def test_the_answer_follows_the_thoughts(make: Make, marks: str, answer: Answer) -> None:
    thoughts = '<think>\nhm {} so, 12 "<|im_start|>\n</think>'
    assert is_json_after(thoughts, answer(make(marks), thoughts + "Sure!"))


@pytest.mark.parametrize(
    ("template", "thoughts"),
    [
        (R1, "hm, {\n</think>"),
        (OTHER, "<|hm|></think> {<|so|>"),
        (GLM, "\n<think>hm</think>"),
    ],
)
@both
def test_other_templates(make: Make, template: str, thoughts: str, answer: Answer) -> None:
    """The prompt begins the thoughts, or their marks are known from the template alone, or there is
    space before them."""
    tokenizer = make(template=template)
    assert is_json_after(thoughts, answer(tokenizer, thoughts + "Sure!"))


@pytest.mark.parametrize(
    ("style", "script"), [(OFF, "<think>a</think>"), (PLAIN_STYLE, '{"b": 2}')]
)
@both
def test_without_thoughts_it_begins_at_once(
    make: Make, style: Style, script: str, answer: Answer
) -> None:
    """Thoughts may be disabled, or the target answers without any."""
    assert is_json(answer(make(), script, style))


def test_a_text_is_no_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level()
    say(monkeypatch, ids(tokenizer, "<think>hm"))
    llm = LLM(target_of(tokenizer), max_batch=1, kv_tokens=512)
    for prompt in ("the cat", "say <think>", ids(tokenizer, "<think>")):
        assert is_json(llm.generate([prompt], JSON)[0].text)


@pytest.mark.parametrize("thoughts", [
    "<|channel|>analysis<|message|>hm {<|end|><|start|>assistant<|channel|>final<|message|>",
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    "<|channel|>final <|constrain|>json<|message|>",
    "<|channel|>final<|message|>",
])  # fmt: skip
def test_harmony(thoughts: str, answer: Answer) -> None:
    """The answer is the last channel's message."""
    assert is_json_after(thoughts, answer(harmony(), thoughts + "Sure!"))


def test_a_call_of_harmony_is_no_answer(answer: Answer) -> None:
    call = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": 1}<|im_end|>'
    assert answer(harmony(), call) == call


@pytest.mark.parametrize(
    ("template", "style", "header", "opening", "stage"),
    [
        (QWEN3, PLAIN_STYLE, "<|im_start|>assistant", "<think>", "before"),
        (QWEN3, OFF, "<|im_start|>assistant", "<think>", "after"),
        (R1, PLAIN_STYLE, "<|im_start|>assistant", "<think>", "inside"),
        (GLM, PLAIN_STYLE, "<|assistant|>", "\n<think>", "before"),
        (GLM, OFF, "<|assistant|>", "\n<think>", "after"),
        (V31, PLAIN_STYLE, "<Assistant>", "<think>", "after"),
        (V31, ON, "<Assistant>", "<think>", "inside"),
        (GEMMA, PLAIN_STYLE, "<|turn>model", "<|channel>thought", "after"),
        (GEMMA, ON, "<|turn>model", "<|channel>thought", "before"),
        (BEGUN, PLAIN_STYLE, "<|assistant|>", "<think>", "inside"),
    ],
)
@both
def test_where_a_prompt_leaves_the_target(
    make: Make, template: str, style: Style, header: str, opening: str, stage: str
) -> None:
    tokenizer = make(template=template)
    thoughts = find_thoughts(tokenizer)
    assert thoughts is not None
    assert (thoughts.header, thoughts.opening) == (header, opening)
    assert thoughts.stage(tokenizer, prompt_ids(tokenizer, ASKED, style)) == stage


@both
def test_thoughts_without_end(make: Make, answer: Answer) -> None:
    """Every token may come in them: marks, ends, stray bytes."""
    tokenizer = make(template=R1)
    grammars = Grammars(target_of(tokenizer))
    matcher = grammars.matcher(JSON, prompt_ids(tokenizer, ASKED))
    assert matcher is not None
    for token in [*range(3, 60), *ids(tokenizer, "<think>{")]:
        assert matcher.allowed().all()
        matcher.advance([token])
    assert answer(tokenizer, "hm" + END) == "hm" + END


def words(tokenizer: Any) -> list[int]:
    """Tokens to draw from: the marks now and then."""
    marks = ids(tokenizer, "<think></think>")
    return [*marks, *ids(tokenizer, '{"a": 12}<|im_end|>hm')]


@pytest.mark.parametrize("template", [QWEN3, R1])
@pytest.mark.parametrize("marks", ["added", "text"])
@both
def test_masks_along_a_draft(make: Make, marks: str, template: str) -> None:
    """Looking ahead changes nothing."""
    tokenizer, rng = make(marks, template), random.Random(5)
    grammars, prompt = Grammars(target_of(tokenizer)), prompt_ids(tokenizer, ASKED)

    def at(said: list[int]) -> Matcher:
        matcher = grammars.matcher(JSON, prompt)
        assert matcher is not None
        for token in said:
            matcher.advance([token])
        return matcher

    for _ in range(40):
        said = list[int]()
        for _ in range(rng.randrange(12)):
            allowed = [t for t in words(tokenizer) if at(said).allowed()[t] and t != 2]
            said += rng.sample(allowed, min(1, len(allowed)))
        tail = rng.choices(words(tokenizer), k=4)
        rows = at(said).masks(chain(tail))
        for number, row in enumerate(rows):
            before = [*said, *tail[:number]]
            legal = (
                all(at(before[:n]).allowed()[t] for n, t in enumerate(before)) and 2 not in before
            )
            assert (row == at(before).allowed()).all() if legal else row.all()


@both
def test_looked_up_tokens_after_the_thoughts_are_the_grammars(make: Make) -> None:
    tokenizer = make(template=R1)
    matcher = Grammars(target_of(tokenizer)).matcher(JSON, prompt_ids(tokenizer, ASKED))
    assert matcher is not None
    inside = ids(tokenizer, "a</think>")
    for text, legal in (("{", True), ("x", False)):
        said = [*inside, *ids(tokenizer, text)]
        assert (matcher.count_allowed(said) == len(said)) == legal
        assert matcher.count_allowed(said) >= len(inside)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@both
def test_thoughts_are_those_without_a_grammar(make: Make, temperature: float) -> None:
    """With drafts and without; what follows them is the grammar's."""
    tokenizer = make(template=R1)
    target = target_of(tokenizer)
    prompt, close = prompt_ids(tokenizer, ASKED), tokenizer.convert_tokens_to_ids("</think>")
    bias = {close: 3.0, 2: -9.0}
    plain = LLM(target, max_batch=1, kv_tokens=512)
    drafting = plain.use(make_drafter(target, "p-eagle"), k=3)
    for seed in range(3):
        how: dict[str, Any] = {"temperature": temperature, "seed": seed, "logit_bias": bias}
        free = plain.generate([prompt], SamplingParams(max_tokens=120, **how))[0].token_ids
        bound = SamplingParams(max_tokens=120, json_schema=SCHEMA, **how)
        answers = [llm.generate([prompt], bound)[0] for llm in (plain, drafting)]
        assert answers[0].token_ids == answers[1].token_ids
        count = free.index(close) + 1 if close in free else len(free)
        assert answers[0].token_ids[:count] == free[:count]
        if close in free and answers[0].finish_reason == "stop":
            assert is_json(tokenizer.decode(answers[0].token_ids[count:]))


def test_a_target_that_does_not_think() -> None:
    tokenizer = byte_level(template=CHATML)
    matcher = Grammars(target_of(tokenizer)).matcher(JSON, prompt_ids(tokenizer, ASKED))
    assert type(matcher) is Matcher
