"""/openapi.json is true, and nothing that is sent breaks the server.

`PEAGLE_API_CASES=10000 pytest -s tests/server/test_document.py` sends more, drawn anew each time.
"""

import os
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from serving import MODEL, Running, make_llm, start
from test_worker import all_free, until
from tiny import CHATML

pytest.importorskip("schemathesis", reason="schemathesis is not installed: pip install '.[dev]'")

from schemathesis import GenerationMode, openapi  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi import checks  # noqa: E402

CASES = int(os.environ.get("PEAGLE_API_CASES", "500"))
HELD = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
    checks.unsupported_method,
]
PATIENCE = 60  # seconds: a case that takes longer hangs


@pytest.fixture(scope="module")
def small(drafter: Any) -> Any:
    """Answers are short: what is asked matters here, not what is said. Tools can be demanded."""
    llm = make_llm(drafter, kv_tokens=96)
    llm.tokenizer.chat_template = CHATML + "{# <tool_call> #}"
    started = start(llm, max_queue=8)
    yield started
    started.stop()


@pytest.mark.slow
def test_any_body(small: Running) -> None:
    """Bodies that the document admits, and such that it does not."""
    document = openapi.from_url(f"{small.url}/openapi.json")
    posts, statuses = document.include(method="POST"), Counter[tuple[str, int]]()
    right, wrong = map(posts.as_strategy, (GenerationMode.POSITIVE, GenerationMode.NEGATIVE))

    @settings(
        max_examples=CASES,
        derandomize=CASES == 500,
        database=None,
        deadline=None,
        phases=[Phase.generate],  # a case that hangs would be waited for again and again
        suppress_health_check=list(HealthCheck),
    )
    @given(case=st.one_of(right, wrong))
    def ask(case: Any) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = MODEL  # hardly any would get further
        answer = case.call(timeout=PATIENCE)
        statuses[case.path, answer.status_code] += 1
        case.validate_response(answer, checks=HELD)

    ask()
    print(*sorted(statuses.items()), sep="\n")
    assert sum(statuses.values()) >= CASES
    paths = {path for path, _ in statuses}
    assert len(paths) == 3 and all(statuses[p, 200] and statuses[p, 400] for p in paths), statuses
    until(lambda: all_free(small))
    assert small.get("/health").json() == {"status": "ok"}


def test_every_get(small: Running) -> None:
    document = openapi.from_url(f"{small.url}/openapi.json")

    @settings(max_examples=10, derandomize=True, database=None, deadline=None)
    @given(case=document.include(method="GET").as_strategy())
    def ask(case: Any) -> None:
        case.call_and_validate(timeout=PATIENCE, checks=HELD)

    ask()


def test_the_document_needs_the_key(serve: Any) -> None:
    running = serve(api_key="secret")
    assert running.get("/openapi.json").status_code == 401
    document = running.get("/openapi.json", headers={"authorization": "Bearer secret"}).json()
    assert document["security"] == [{"key": []}]
    paths = document["paths"].items()
    open_ = {path for path, how in paths if how.get("get", {}).get("security") == []}
    assert open_ == {"/health", "/ping"}
    assert not [name for name in document["components"]["schemas"] if "Validation" in name]
