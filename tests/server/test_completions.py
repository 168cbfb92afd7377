"""/v1/completions answers with the engine's output."""

import json
from functools import partial

import openai
import pytest
from serving import MODEL, Running, Serve
from thinking import byte_fallback, thinking_target
from tiny import make_target

from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.run import Completion

PROMPT = "the cat sat on"


def alone(llm: LLM, **params: object) -> Completion:
    return llm.generate([PROMPT], SamplingParams(**params))[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5}])
def test_the_engines_text_and_counts(running: Running, llm: LLM, given: dict[str, float]) -> None:
    wanted = alone(llm, max_tokens=40, **given)
    got = running.complete(PROMPT, max_tokens=40, **given)  # type: ignore[arg-type]
    [choice] = got.choices
    assert (choice.text, choice.finish_reason) == (wanted.text, wanted.finish_reason)
    usage = got.usage
    prompt = len(llm.prompt_ids(PROMPT))
    tokens = len(wanted.token_ids)
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, tokens)
    assert usage.total_tokens == prompt + tokens
    details, accepted = usage.completion_tokens_details, sum(wanted.stats.accepted)
    assert details.accepted_prediction_tokens == accepted > 0
    assert details.rejected_prediction_tokens == wanted.stats.drafted - accepted


def test_streamed(running: Running, llm: LLM) -> None:
    wanted = alone(llm, max_tokens=40)
    asked = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    parts = list(running.complete(PROMPT, max_tokens=40, **asked))
    *emitted, last = parts
    assert "".join(part.choices[0].text for part in emitted) == wanted.text
    assert [part.choices[0].finish_reason for part in emitted[:-1]] == [None] * (len(emitted) - 1)
    assert emitted[-1].choices[0].finish_reason == "length"
    assert last.choices == [] and last.usage is not None
    assert last.usage.completion_tokens == 40
    assert len(emitted) > 5, "text comes as it is decided"


def test_a_streamed_part_is_one_line_for_every_client(serve: Serve) -> None:
    """Some end lines wherever Unicode does."""
    running = serve(LLM(thinking_target(byte_fallback()), max_batch=2, kv_tokens=512))
    text = "a\N{LINE SEPARATOR}b\x85c\x0bd"
    body = {"prompt": "a", "stream": True, "max_tokens": 40}
    body["structured_outputs"] = {"choice": [text]}
    answer = running.post("/v1/completions", json=body).text
    *parts, end = [line.removeprefix("data: ") for line in answer.splitlines() if line]
    assert end == "[DONE]"
    assert "".join(json.loads(part)["choices"][0]["text"] for part in parts) == text


def test_prompts_as_ids_and_lists(running: Running, llm: LLM) -> None:
    ids = llm.prompt_ids(PROMPT)
    texts = {}
    for prompt in (PROMPT, ids, [PROMPT, "a hat"], [ids, [60, 61]]):
        got = running.complete(prompt, temperature=0, max_tokens=9)
        assert [choice.index for choice in got.choices] == list(range(len(got.choices)))
        texts[str(prompt)] = [choice.text for choice in got.choices]
    first = alone(llm, max_tokens=9).text
    assert all(emitted[0] == first for emitted in texts.values())
    assert [len(emitted) for emitted in texts.values()] == [1, 1, 2, 2]


def test_several_answers(running: Running, llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=12)
    wanted = llm.generate([PROMPT, "a hat"], params)
    got = running.complete([PROMPT, "a hat"], n=3, seed=3, max_tokens=12)
    assert [choice.text for choice in got.choices] == [answer.text for answer in wanted]
    assert got.usage is not None, "a prompt counts once"
    assert got.usage.prompt_tokens == sum(len(llm.prompt_ids(p)) for p in (PROMPT, "a hat"))
    assert got.usage.completion_tokens == sum(len(answer.token_ids) for answer in wanted)


def test_stops(running: Running, llm: LLM) -> None:
    free = alone(llm, max_tokens=40)
    stop = free.text[10:12]
    for given in (stop, [stop, "never emitted"]):
        got = running.complete(PROMPT, temperature=0, max_tokens=40, stop=given)
        assert got.choices[0].text == free.text[: free.text.index(stop)]
        assert got.choices[0].finish_reason == "stop"
    token = free.token_ids[6]
    extra = {"stop_token_ids": [token]}
    got = running.complete(PROMPT, temperature=0, max_tokens=40, extra_body=extra)
    assert got.usage.completion_tokens == free.token_ids.index(token) + 1


def test_parameters_reach_the_engine(running: Running, llm: LLM) -> None:
    ours = {"min_p": 0.01, "top_k": 50, "repetition_penalty": 1.2}
    common = {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.7}
    wanted = alone(llm, max_tokens=20, seed=1, logit_bias={70: 5.0}, **ours, **common)
    asked = {"max_tokens": 20, "seed": 1, "logit_bias": {"70": 5}, **common}
    got = running.complete(PROMPT, **asked, extra_body=ours | {"some_new_field": 1})
    assert got.choices[0].text == wanted.text != alone(llm, max_tokens=20).text


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(running: Running, llm: LLM, stream: bool) -> None:
    wanted = alone(llm, max_tokens=10, logprobs=2)
    got = running.complete(PROMPT, max_tokens=10, temperature=0, logprobs=2, stream=stream)
    shown = [part.choices[0].logprobs for part in (got if stream else [got])]
    assert wanted.logprobs is not None
    probs = [p for part in shown for p in part.token_logprobs]
    assert probs == pytest.approx([p.logprob for p in wanted.logprobs], abs=1e-6)
    tokens = [t for part in shown for t in part.tokens]
    assert "".join(tokens) == wanted.text
    offsets = [at for part in shown for at in part.text_offset]
    assert offsets == [sum(map(len, tokens[:i])) for i in range(10)]
    assert all(len(top) == 2 for part in shown for top in part.top_logprobs)


def test_forms(running: Running) -> None:

    def emitted(**form: object) -> str:
        given = {"seed": 1, "max_tokens": 60, "extra_body": form}
        return running.complete(PROMPT, **given).choices[0].text

    schema = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}
    schema["additionalProperties"] = False  # type: ignore[assignment]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert json.loads(emitted(response_format=form))["a"] in (1, 22)
    assert emitted(structured_outputs={"choice": ["cat", 'a "hat"']}) in ("cat", 'a "hat"')
    assert emitted(structured_outputs={"regex": "[ab]{3}"}).strip("ab") == ""
    assert json.loads(emitted(structured_outputs={"json": schema}))["a"] in (1, 22)
    assert emitted(response_format={"type": "json_object"}, logit_bias={}).startswith("{")


def test_cached_tokens(running: Running) -> None:
    prompt = [60 + i for i in range(40)]
    counts = []
    for _ in range(2):
        got = running.complete(prompt, max_tokens=2)
        counts.append(got.usage.prompt_tokens_details.cached_tokens)
    assert counts == [0, 32]


@pytest.mark.parametrize(("window", "room"), [(256, 160), (80, 256)])
def test_max_model_len_is_the_longest_that_fits(serve: Serve, window: int, room: int) -> None:
    llm = LLM(make_target(), lookup=False, kv_tokens=160)
    scheduler = llm.engine.scheduler
    scheduler.window, scheduler.budget = window, 40
    assert serve(llm).client().models.retrieve(MODEL).max_model_len == room  # type: ignore[attr-defined]


def test_invocations(running: Running, llm: LLM) -> None:
    """SageMaker's one route takes the bodies of both APIs."""
    invoke = partial(running.post, "/invocations")
    text = invoke(json={"prompt": PROMPT, "temperature": 0, "max_tokens": 9}).json()
    assert text["choices"][0]["text"] == alone(llm, max_tokens=9).text
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    assert invoke(json=body).json()["object"] == "chat.completion"
    assert invoke(json={"max_tokens": 3}).status_code == 400
    assert running.get("/ping").status_code == 200
    assert [m.id for m in running.client().models.list()] == [MODEL]


def test_null_messages_are_left_out(running: Running) -> None:
    body = {"messages": None, "prompt": PROMPT, "max_tokens": 2}
    assert running.post("/invocations", json=body).json()["object"] == "text_completion"


def test_one_model(running: Running) -> None:
    client = running.client()
    assert client.models.retrieve(MODEL) == next(iter(client.models.list()))
    with pytest.raises(openai.NotFoundError, match=MODEL) as refused:
        client.models.retrieve("a/b")
    assert refused.value.param == "model"
