"""/metrics after known requests: vLLM's names, and numbers that add up."""

from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import MODEL, Running, Serve, make_llm
from tiny import make_target

from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Stats
from peagle.model.drafter import Drafter


def read(running: Running) -> dict[tuple[str, str], float]:
    """(name, the label besides the model's) → value."""
    values = {}
    for family in text_string_to_metric_families(running.get("/metrics").text):
        for sample in family.samples:
            assert sample.labels["model_name"] == MODEL
            [extra] = [v for k, v in sample.labels.items() if k != "model_name"] or [""]
            values[sample.name, extra] = sample.value
    return values


def test_known_requests(serve: Serve, llm: LLM) -> None:
    running, prompt = serve(), [60 + i for i in range(40)]
    before = read(running)
    assert not any(before[name, extra] for name, extra in before if not name.endswith("_created"))
    params = SamplingParams(max_tokens=30)
    answers = [llm.generate([p], params)[0] for p in (prompt, prompt, [90])]
    for given in (prompt, prompt, [90]):
        running.complete(given, max_tokens=30, temperature=0)
    running.complete("a", max_tokens=1, temperature=0)
    values = {name: value for (name, extra), value in read(running).items() if not extra}
    drafting = Stats()
    for answer in answers:
        drafting += answer.stats
    tokens = sum(len(answer.token_ids) for answer in answers) + 1
    wanted: dict[str, Any] = {
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
        "prefix_cache_queries_total": 82,
        "prefix_cache_hits_total": 32,
        "prompt_tokens_total": 82,
        "generation_tokens_total": tokens,
        "num_preemptions_total": 0,
        "time_to_first_token_seconds_count": 4,
        "e2e_request_latency_seconds_count": 4,
        "request_time_per_output_token_seconds_count": 3,
        "spec_decode_num_drafts_total": drafting.rounds,
        "spec_decode_num_draft_tokens_total": drafting.drafted,
        "spec_decode_num_accepted_tokens_total": sum(drafting.accepted),
    }
    assert {name: values[f"vllm:{name}"] for name in wanted} == wanted
    assert sum(drafting.accepted) > 0
    wanted = {
        "spec_decode_num_accepted_tokens_from_lookup_total": drafting.accepted_from_lookup,
        "decode_forwards_total": drafting.forwards,
        "decode_rows_total": drafting.forwards + drafting.drafted,
        "decode_tokens_total": tokens - 4,
    }
    assert {name: values[f"peagle:{name}"] for name in wanted} == wanted
    # A round emits one token and the accepted ones; the first of each request is no interval.
    assert values["vllm:inter_token_latency_seconds_count"] < tokens - 4
    assert values["vllm:e2e_request_latency_seconds_sum"] > 0
    every = read(running)
    reasons = {r: every["vllm:request_success_total", r] for r in ("stop", "length")}
    ends = [answer.finish_reason for answer in answers] + ["length"]
    assert reasons == {r: ends.count(r) for r in reasons}  # type: ignore[comparison-overlap]
    places = [every["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(i)] for i in range(3)]
    assert places == drafting.accepted + [0] * (3 - len(drafting.accepted))


def test_a_round_counts_only_what_it_accepted(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By position; finding a counter takes longer than counting."""
    running = serve()
    counter = running.api.metrics._accepted
    labels = Mock(wraps=counter.labels)
    monkeypatch.setattr(counter, "labels", labels)
    usage = running.complete("the cat sat on", max_tokens=40, temperature=0).usage
    accepted = usage.completion_tokens_details.accepted_prediction_tokens
    assert labels.call_count == accepted > 0


def test_preempted(serve: Serve, drafter: Drafter) -> None:
    """The newest requests wait while memory is short; all are finished."""
    running = serve(make_llm(drafter, kv_tokens=112))
    got = running.complete(
        [[60 + i, 61, 62] for i in range(4)], max_tokens=40, extra_body={"ignore_eos": True}
    )
    assert got.usage.completion_tokens == 160
    values = read(running)
    assert values["vllm:num_preemptions_total", ""] > 0
    assert values["vllm:prompt_tokens_total", ""] == 12
    assert values["vllm:generation_tokens_total", ""] == 160


def test_lookup_alone(serve: Serve) -> None:
    """Without a head all that is accepted is from lookup."""
    alone = LLM(make_target(), max_batch=4, kv_tokens=1024)
    ids = [60, 61, 62]
    answer = alone.generate([ids], SamplingParams(max_tokens=60, ignore_eos=True))[0].token_ids
    running = serve(alone.use(None, nodes=8, lookup=True))
    running.complete([*ids, *answer, *ids], max_tokens=60, temperature=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    values = read(running)
    accepted = values["vllm:spec_decode_num_accepted_tokens_total", ""]
    assert accepted > 0
    assert values["peagle:spec_decode_num_accepted_tokens_from_lookup_total", ""] == accepted
    assert values["peagle:decode_tokens_total", ""] == 59
    assert values["peagle:decode_forwards_total", ""] < 59


@pytest.mark.parametrize("name", ["vllm:spec_decode_num_drafts_total", "vllm:prompt_tokens_total"])
def test_names_are_there_from_the_start(running: Running, name: str) -> None:
    assert (name, "") in read(running)
