"""`peagle serve --engine vllm`: the tests of our server run against the real vLLM, but for what it
does otherwise, which is listed here.

`make test-vllm` runs this; PEAGLE_VLLM_PYTHON names the interpreter. One server for all tests: the
entrypoint of our containers, which becomes `peagle serve`, which becomes vLLM.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.heads.find import find_head

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "server"))
import test_completions as completions  # noqa: E402
import test_conversations as conversations  # noqa: E402
from serving import MODEL, Asked  # noqa: E402

pytestmark = pytest.mark.vllm

TARGET, KEY = "smollm2-135m", "secret"
CONTEXT = 512
# The tests of our server that hold for vLLM as they are: they ask it by OpenAI's client and compare
# with what our engine says. Of the others those cannot that have a seed (vLLM draws by other
# numbers, on CPUs by no temperature that anybody named), a text in parts (it puts line breaks
# between them), JSON with room for white space (which it does not bound), drafts counted in
# `usage` (it does not count them), or our own messages.
SHARED = (
    completions.test_streamed,
    completions.test_prompts_as_ids_and_lists,
    completions.test_stops,
    completions.test_invocations,
    conversations.test_the_engines_text,
    conversations.test_logprobs,
    conversations.test_json_schema,
)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Name a colour."}]}
TOOL = {"type": "function", "function": {"name": "sit", "parameters": {"type": "object"}}}
SPECULATING = "The min_p and logit_bias sampling parameters are not yet supported with speculative"
# What our server does and vLLM refuses: body, status, what it says.
REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": "a", "min_p": 0.1, "temperature": 1.0}, 400, SPECULATING),
    ({"prompt": "a", "logit_bias": {"70": 5}}, 400, SPECULATING),
    (CHAT | {"logit_bias": {"70": 5}}, 400, SPECULATING),
    (CHAT | {"tools": [TOOL]}, 400, "requires --enable-auto-tool-choice"),
]
# What both refuse, each in its own words: body, status, what vLLM says.
BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": "a", "model": "other"}, 404, "The model `other` does not exist"),
    ({"prompt": "a", "temperature": "hot"}, 400, "temperature"),
    ({"prompt": "a", "temperature": -1}, 400, "temperature must be non-negative"),
    ({"prompt": "a", "n": 2, "temperature": 0}, 400, "n must be 1 when using greedy"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens must be at least 1"),
    ({"prompt": "a", "presence_penalty": 3}, 400, "presence_penalty must be in"),
    ({"prompt": "a", "response_format": {"type": "xml"}}, 400, "response_format"),
    ({"prompt": "a", "suffix": "b"}, 400, "suffix"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": [99_999_999]}, 400, "out of vocabulary"),
    ({"prompt": [70] * (CONTEXT + 9)}, 400, f"{CONTEXT}"),
    ({"messages": []}, 400, "empty conversation"),
]


@dataclass
class Served(Asked):
    """`peagle serve --engine vllm`, asked as our own server is in its tests."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def client(self, key: str = KEY) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

    def http(self, key: str = KEY) -> httpx2.Client:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=120)


@pytest.fixture(scope="module")
def running(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("vllm") / "log"
    flags = f"--enforce-eager --no-enable-prefix-caching --max-model-len {CONTEXT}"
    flags += " --middleware peagle.server.middleware.Route"  # found beside us, by PYTHONPATH
    options = f"--host 127.0.0.1 --served-model-name {MODEL} --dtype float32 --max-batch 4"
    environment = os.environ | {
        "PEAGLE_SERVE": f"{TARGET} --engine vllm {options} -- {flags}",
        "PEAGLE_VLLM_PYTHON": vllm_python,
        "PEAGLE_API_KEY": KEY,
        "SAGEMAKER_BIND_TO_PORT": "0",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    with log.open("wb") as file:
        command = [sys.executable, "-m", "peagle.deploy.container", "serve"]
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        yield _wait(process, log)
    finally:
        if process.poll() is None:
            family = [psutil.Process(process.pid)]
            family += family[0].children(recursive=True)
            process.terminate()
            for left in psutil.wait_procs(family, timeout=60)[1]:
                left.kill()
        process.wait()


def _wait(process: subprocess.Popen[bytes], log: Path) -> Served:
    """Until it answers. (It may take minutes on a machine that is busy.)"""
    until = time.monotonic() + 600
    while time.monotonic() < until and process.poll() is None:
        time.sleep(0.5)
        port = re.search(
            r"at 127\.0\.0\.1:(\d+), tiny: p-eagle \(4 layers, K = 5\)", log.read_text()
        )
        try:
            url = f"http://127.0.0.1:{port[1]}" if port else ""
            if url and httpx2.get(f"{url}/health").status_code == 200:
                return Served(process, url, log)
        except httpx2.HTTPError:
            continue
    raise AssertionError(f"vLLM did not come up:\n{log.read_text()[-4000:]}")


@pytest.fixture(scope="module")
def llm() -> LLM:
    """Our engine, with the head by which vLLM drafts."""
    head = find_head(TARGET, method="p-eagle")
    assert head is not None
    return LLM(TARGET, head=head.folder, k=5, dtype="float32")


@pytest.mark.parametrize("test", SHARED, ids=lambda test: f"{test.__module__}.{test.__name__}")
def test_as_our_server(test: Any, running: Served, llm: LLM) -> None:
    fixtures = {"running": running, "llm": llm}
    test(**{name: fixtures[name] for name in test.__annotations__ if name in fixtures})


def test_drafts_are_accepted(running: Served, llm: LLM) -> None:
    """Greedy answers, penalised and not; the counters say that they were drafted."""
    before = _accepted(running)
    prompt = "def fib(n):\n"
    for given in ({}, {"presence_penalty": 0.9, "frequency_penalty": -0.4}):
        wanted = llm.generate([prompt], SamplingParams(max_tokens=32, **given))[0]
        got = running.complete(prompt, max_tokens=32, temperature=0, **given)
        assert got.choices[0].text == wanted.text
        assert got.usage is not None and got.usage.completion_tokens == len(wanted.token_ids)
    assert _accepted(running) > before


def _accepted(running: Served) -> float:
    with running.http() as http:
        families = text_string_to_metric_families(http.get("/metrics").text)
    name = "vllm:spec_decode_num_accepted_tokens"
    return sum(s.value for family in families if family.name == name for s in family.samples[:1])


def test_it_has_the_metrics_of_the_dashboard_and_the_alerts(running: Served) -> None:
    folder = Path(__file__).resolve().parents[2] / "dashboards"
    asked = {n for file in folder.iterdir() for n in re.findall(r"vllm:\w+", file.read_text())}
    with running.http() as http:
        families = text_string_to_metric_families(http.get("/metrics").text)
        assert asked <= {sample.name for family in families for sample in family.samples}


def test_logprobs(running: Served, llm: LLM) -> None:
    wanted = llm.generate([completions.PROMPT], SamplingParams(max_tokens=10, logprobs=2))[0]
    got = running.client().completions.create(
        model=MODEL, prompt=completions.PROMPT, max_tokens=10, temperature=0, logprobs=2
    )
    shown = got.choices[0].logprobs
    assert shown is not None and wanted.logprobs is not None
    assert "".join(shown.tokens or []) == wanted.text
    said = [entry.logprob for entry in wanted.logprobs]
    assert shown.token_logprobs == pytest.approx(said, abs=1e-3)


def test_forms(running: Served, llm: LLM) -> None:
    """Those that leave no room for white space."""
    client = running.client()
    schema = {"enum": ["red", "green"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for given, ours in (
        ({"structured_outputs": {"regex": "[ab]{3}"}}, {"regex": "[ab]{3}"}),
        ({"response_format": form}, {"json_schema": schema}),
    ):
        params = SamplingParams(max_tokens=20, **ours)  # type: ignore[arg-type]
        wanted = llm.generate([completions.PROMPT], params)[0]
        got = client.completions.create(
            model=MODEL, prompt=completions.PROMPT, max_tokens=20, temperature=0, extra_body=given
        )
        assert got.choices[0].text == wanted.text


def test_what_it_says_of_the_head(running: Served) -> None:
    """Temperatures are lost in 0.32.0: tokens of probability 1e-15 were seen at 0.7."""
    log = running.log.read_text()
    assert "right only at temperature 0" in log
    assert "with its correction, by the plugin peagle-vllm" in log


def test_several_answers(running: Served) -> None:
    asked: Any = {"model": MODEL, "prompt": ["a hat", "a cat"], "n": 2, "seed": 5, "max_tokens": 9}
    got = running.client().completions.create(**asked)
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
    assert got.choices[0].text != got.choices[1].text


def test_the_other_routes(running: Served, llm: LLM) -> None:
    with running.http() as http:
        assert http.get("/ping").status_code == 200
        attributes = {"X-Amzn-SageMaker-Custom-Attributes": "route=/tokenize"}
        body = {"model": MODEL, "prompt": "the cat"}
        routed = http.post("/invocations", json=body, headers=attributes)
        assert routed.json()["tokens"] == llm.prompt_ids("the cat")


@pytest.mark.parametrize(("body", "status", "says"), [*REFUSED, *BAD])
def test_refused(running: Served, body: dict[str, Any], status: int, says: str) -> None:
    route = "chat/completions" if "messages" in body else "completions"
    with running.http() as http:
        reply = http.post(f"/v1/{route}", json={"model": MODEL, "max_tokens": 3} | body)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert says in error["message"] and error["code"] == status


def test_a_key_is_needed(running: Served) -> None:
    """Everywhere, also where vLLM itself asks for none."""
    with pytest.raises(openai.AuthenticationError):
        running.client("other").models.list()
    with running.http("other") as http:
        for path in ("/invocations", "/tokenize", "/generative_scoring", "/version"):
            assert http.post(path, json={"model": MODEL, "prompt": "a"}).status_code == 401, path
        assert [http.get(path).status_code for path in ("/health", "/metrics")] == [200, 200]


def test_told_to_end(running: Served) -> None:
    """The last test: the signal reaches vLLM, which finishes a running answer, and its exit code
    is ours."""
    asked: Any = {"model": MODEL, "prompt": "a hat", "max_tokens": 24, "temperature": 0}
    more = {"ignore_eos": True}
    chunks = running.client().completions.create(**asked, stream=True, extra_body=more)
    parts = [next(chunks)]
    running.process.send_signal(signal.SIGTERM)
    parts += chunks
    assert parts[-1].choices[0].finish_reason == "length", running.log.read_text()[-2000:]
    assert running.process.wait(60) == 0, running.log.read_text()[-2000:]
