"""Grammars: what may come next, along drafts and back; what cannot be compiled."""

import random
from collections.abc import Sequence

import pytest
import torch
from oracle import end_at
from refusals import refused
from tiny import chain, make_target, make_tokenizer, with_call_tokens
from tokenizers import decoders
from torch import Tensor

from peagle.engine.grammar import Matcher
from peagle.engine.grammars import Grammars, in_lark
from peagle.engine.params import GrammarTooComplex, RequestFailure, SamplingParams
from peagle.model.target import Target

TOKENIZER = make_tokenizer()
EOS = 2
FIELDS = {"a": {"type": "integer"}, "on": {"type": "array", "items": {"enum": ["x", "y"]}}}
SCHEMA = {"type": "object", "properties": FIELDS, "required": ["a"], "additionalProperties": False}
FORMS = [
    SamplingParams(json_schema=SCHEMA),
    SamplingParams(regex="(the )?[a-d]{2,5}(cat|hat)?!?"),
    SamplingParams(grammar='start: "(" start ")" | DIGIT+\nDIGIT: /[0-9]/'),
]


@pytest.fixture(scope="module")
def grammars(target: Target) -> Grammars:
    return Grammars(target)


def ids(mask: Tensor) -> set[int]:
    return set(mask.nonzero()[:, 0].tolist())


def tokens(*texts: str) -> list[int]:
    found = [TOKENIZER.convert_tokens_to_ids(text) for text in texts]
    assert None not in found
    return found


def make(grammars: Grammars, params: SamplingParams, said: Sequence[int] = ()) -> Matcher:
    """A matcher behind what was said."""
    matcher = grammars.matcher(params)
    assert matcher is not None
    matcher.advance(list(said))
    return matcher


def test_by_hand(grammars: Grammars) -> None:
    matcher = make(grammars, SamplingParams(regex="X(Y|Z)?"))
    x, y, z = tokens("X", "Y", "Z")
    assert matcher.allowed().shape == (128,)
    assert ids(matcher.allowed()) == {x}
    matcher.advance([x])
    assert ids(matcher.allowed()) == {y, z, EOS}
    matcher.advance([z])
    assert ids(matcher.allowed()) == {EOS}


def test_nothing_to_follow(grammars: Grammars) -> None:
    assert grammars.matcher(SamplingParams(stop=("x",))) is None


def test_all_end_tokens_end(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    end_at(monkeypatch, target, 0, 90)
    matcher = make(Grammars(target), SamplingParams(regex="X"), tokens("X"))
    assert ids(matcher.allowed()) == {0, EOS, 90}
    assert matcher.masks(chain([90, 70]))[1:].all(), "behind the end nothing is read"


def test_logits_wider_than_the_tokenizer() -> None:
    matcher = make(Grammars(make_target(200)), SamplingParams(regex="[^a]+"))
    allowed = matcher.allowed()
    assert allowed.shape == (200,) and not allowed[128:].any() and allowed.sum() > 60


@pytest.mark.parametrize("longest", [32, 0])
def test_white_space_of_json_is_bounded(grammars: Grammars, longest: int) -> None:
    """A line break and its indentation; a schema may ask for none."""
    asked = {} if longest else {"x-guidance": {"whitespace_flexible": False}}
    matcher = make(grammars, SamplingParams(json_schema={"type": "array", **asked}), tokens("["))
    space, line = tokens("Ġ", "Ċ")
    assert (line in ids(matcher.allowed())) == (longest > 0)
    for _ in range(longest):
        assert space in ids(matcher.allowed())
        matcher.advance([space])
    assert not {space, line} & ids(matcher.allowed())


def random_walk(matcher: Matcher, length: int, rng: random.Random) -> list[int]:
    said = list[int]()
    while len(said) < length:
        choice = sorted(ids(matcher.allowed()))
        said.append(rng.choice(choice))
        if said[-1] == EOS:
            break
        matcher.advance(said[-1:])
    return said


@pytest.mark.parametrize("params", FORMS)
def test_masks_along_a_draft(grammars: Grammars, params: SamplingParams) -> None:
    """Looking ahead changes nothing, whatever was drafted: the end, or what is not allowed."""
    rng = random.Random(5)
    for _ in range(20):
        matcher, said = make(grammars, params), list[int]()
        for _ in range(4):
            draft = random_walk(make(grammars, params, said), 4, rng)
            if rng.random() < 0.5:
                draft[rng.randrange(len(draft))] = rng.randrange(128)
            masks = matcher.masks(chain(draft))
            assert masks.shape == (len(draft) + 1, 128)
            replay = make(grammars, params, said)
            for row, token in zip(masks, [*draft, EOS], strict=True):
                assert torch.equal(row, replay.allowed())
                if token == EOS or not row[token]:
                    break
                replay.advance([token])
            went = random_walk(make(grammars, params, said), rng.randrange(3), rng)
            if EOS in went:
                break
            matcher.advance(went)
            said += went


@pytest.mark.parametrize("params", FORMS)
def test_allowed_tokens_are_counted_up_to_the_first_refused_one(
    grammars: Grammars, params: SamplingParams
) -> None:
    """As the masks have it, but for an end that must come, which may be left out."""
    rng = random.Random(7)
    for _ in range(100):
        said = [token for token in random_walk(make(grammars, params), 3, rng) if token != EOS]
        matcher = make(grammars, params, said)
        draft = [*random_walk(make(grammars, params, said), 5, rng), rng.randrange(128)]
        if rng.random() < 0.5:
            draft[rng.randrange(len(draft))] = rng.randrange(128)
        count = matcher.count_allowed(draft)
        replay = make(grammars, params, said)
        allowed = list[int]()
        for token in draft:
            if EOS in allowed or not replay.allowed()[token]:
                break
            replay.advance([token])
            allowed.append(token)
        assert draft[:count] in (allowed, [token for token in allowed if token != EOS])
        uncounted = make(grammars, params, said)
        assert torch.equal(matcher.allowed(), uncounted.allowed()), "counting changes nothing"


def test_a_grammar_is_compiled_once(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, compiled = Grammars(target), list[str]()
    compile_one = grammars._compiled
    monkeypatch.setattr(
        grammars, "_compiled", lambda *key: (compiled.append(key[1]), compile_one(*key))[1]
    )
    first, second = (make(grammars, SamplingParams(regex="[XY]Z")) for _ in range(2))
    assert len(compiled) == 2 and compile_one.cache_info().misses == 1
    first.advance(tokens("X"))
    assert ids(second.allowed()) == set(tokens("X", "Y")), "sequences do not share a state"


@pytest.mark.parametrize(
    ("field", "grammar"),
    [
        ("regex", "a("),
        ("regex", "é+"),
        ("regex", "a" * 99 + "("),
        ("regex", "caf\udce9"),  # a byte of the command line that is no UTF-8
        ("grammar", "start: foo"),
        ("json_schema", '{"type": "text"}'),
        ("json_schema", '{"$ref": "#/nowhere"}'),
        ("json_schema", '{"dependentSchemas": {}}'),
        ("json_schema", '{"x-guidance": {"typo": 1}}'),
    ],
)
def test_what_cannot_be_compiled(grammars: Grammars, field: str, grammar: str) -> None:
    with refused(field) as caught:
        grammars.matcher(SamplingParams(**{field: grammar}))
    assert caught.value.value == grammar and len(str(caught.value)) < 500


def test_targets_that_cannot_follow_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    target.tokenizer.eos_token = None
    with refused() as error:
        Grammars(target).matcher(FORMS[0])
    assert "lacks a token that ends an answer" in str(error.value)
    monkeypatch.setattr(target, "tokenizer", None)
    end_at(monkeypatch, target, 2)
    with refused() as error:
        Grammars(target).matcher(FORMS[0])
    assert "lacks a fast tokenizer" in str(error.value)


@pytest.mark.parametrize("fault", ["tokens that are no bytes", "an end that is no token"])
def test_targets_whose_vocabulary_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Only a request with a grammar is told."""
    target = make_target()
    if fault == "an end that is no token":
        end_at(monkeypatch, target, 9999)
    else:
        target.tokenizer.backend_tokenizer.decoder = decoders.Metaspace()
    grammars = Grammars(target)
    grammars.warm_up()
    assert grammars.matcher(SamplingParams()) is None
    with refused() as error:
        grammars.matcher(FORMS[0])
    assert str(error.value).startswith("tiny-0 cannot follow grammars: ")


def test_a_grammar_that_grows_too_complex_fails_its_request(grammars: Grammars) -> None:
    """A failed matcher drafts nothing and says why when the next token is chosen."""
    matcher = make(grammars, FORMS[1])
    matcher._state.consume_tokens(tokens("Z"))  # never allowed: how any failure looks
    assert not matcher.draftable().any() and matcher.count_allowed([5, 6]) == 0
    with pytest.raises(RequestFailure, match="cannot be followed any further") as caught:
        matcher.masks(chain([5]))
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module", params=[False, True], ids=["added", "special"])
def with_marks(request: pytest.FixtureRequest) -> Target:
    """A target whose tokenizer has the marks of tool calls as added tokens 3 and 4."""
    target = make_target()
    target.tokenizer = with_call_tokens(make_tokenizer(), special=request.param)
    return target


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (SamplingParams(regex="<tool_call>x</tool_call>"), "<tool_call>x</tool_call>"),
        (SamplingParams(regex="a?<tool_(call)>"), None),
        (SamplingParams(grammar='start: "<tool_call>" "y"'), "<tool_call>y"),
        (SamplingParams(json_schema={"const": "<tool_call>"}), '"<tool_call>"'),
        (SamplingParams(json_schema={"const": "a<|im_end|>b"}), '"a<|im_end|>b"'),
        (SamplingParams(json_schema={"enum": ["<|im_start|>", "<|im_end|>"]}), None),
    ],
)
def test_text_of_a_grammar_that_names_an_added_token_is_spelled(
    with_marks: Target, params: SamplingParams, text: str | None
) -> None:
    """An added token stands for no bytes, an end among them: text of its name is other tokens."""
    rng, grammars = random.Random(3), Grammars(with_marks)
    for _ in range(4):
        said = random_walk(make(grammars, params), 40, rng)
        assert said[-1] == EOS and min(said[:-1]) > 4
        written = "".join(TOKENIZER.convert_ids_to_tokens(said[:-1]))
        assert written == text if text else written.strip('"a').startswith("<")
        again = make(grammars, params)
        masks = again.masks(chain(said[:4]))
        assert all(masks[row, token] for row, token in enumerate(said[:4])), "drafts agree"
        assert again.count_allowed(said[:-1]) == len(said) - 1


def test_text_that_the_vocabulary_lacks(grammars: Grammars) -> None:
    """llguidance forces the tokens of what is left of it, which the grammar refuses."""
    matcher = make(grammars, SamplingParams(grammar='start: "ë\\\\"'))
    with pytest.raises(GrammarTooComplex, match="no token spells"):
        matcher.allowed()
    assert not matcher.draftable().any()


def test_added_tokens_in_lark(with_marks: Target) -> None:
    """They are written by their ids, and are what may come; other text stays a literal."""
    tokenizer = with_marks.tokenizer
    assert in_lark(tokenizer, "<tool_call>\n") == '<[3]> "\\n"'
    assert in_lark(tokenizer, "a</tool_call><|im_end|>") == '"a" <[4]> <[2]>'
    assert in_lark(TOKENIZER, "<tool_call>\n") == '"<tool_call>\\n"', "no token there"
    opening, closing = in_lark(tokenizer, "<tool_call>"), in_lark(tokenizer, "</tool_call>")
    rule = f"start: {opening} X {closing}\nX: /x+/"
    matcher = make(Grammars(with_marks), SamplingParams(grammar=rule))
    [x] = tokens("x")
    assert ids(matcher.allowed()) == {3}
    assert matcher.count_allowed([3, x, 4]) == 3
    masks = matcher.masks(chain([3, x, 4]))
    assert [ids(row) for row in masks] == [{3}, {x}, {x, 4}, {EOS}]
    matcher.advance([3, x, 4, EOS])


def test_a_token_that_the_grammar_refuses_is_no_complexity(grammars: Grammars) -> None:
    """An emitted token was allowed, so it is no fault of the grammar's author."""
    matcher = make(grammars, FORMS[1])
    with pytest.raises(RequestFailure, match="refuses a token that it allowed"):
        matcher.advance(tokens("Z"))
