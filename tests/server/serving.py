"""A server in a thread of this process, on a free port, and ways to ask it."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from openai import OpenAI
from tiny import make_target, own_answers
from trained_heads import trained_head

from peagle.engine.engine import Engine
from peagle.engine.llm import LLM
from peagle.engine.params import TokenLogprob
from peagle.model.drafter import Drafter
from peagle.server.app import Api, ServerConfig
from peagle.server.run import Server, bind

MODEL = "tiny"


class Asked:
    """A server that answers OpenAI's client."""

    def client(self) -> OpenAI:
        raise NotImplementedError

    def http(self) -> httpx2.Client:
        raise NotImplementedError

    def get(self, path: str, **more: Any) -> httpx2.Response:
        with self.http() as http:
            return http.get(path, **more)

    def post(self, path: str, **more: Any) -> httpx2.Response:
        with self.http() as http:
            return http.post(path, **more)

    def complete(self, prompt: Any, **asked: Any) -> Any:
        """The answer of /v1/completions."""
        return self.client().completions.create(model=MODEL, prompt=prompt, **asked)

    def chat(self, messages: Any, **asked: Any) -> Any:
        """The answer of /v1/chat/completions."""
        return self.client().chat.completions.create(model=MODEL, messages=messages, **asked)


@dataclass
class Running(Asked):
    """A server of ours, and ways to ask it."""

    api: Api
    server: Server
    thread: threading.Thread
    url: str

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30)

    def http(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=30)

    def stop(self) -> None:
        self.api.worker.draining = True
        self.thread.join(30)
        assert not self.thread.is_alive()


def train_head(folder: Path) -> Drafter:
    """One whose drafts the tiny target often accepts."""
    target = make_target()
    return trained_head(target, "p-eagle", own_answers(target, 64), folder)


def make_llm(drafter: Drafter | None, max_batch: int = 4, kv_tokens: int = 1024) -> LLM:
    """Deterministic, so that what is said does not depend on the company."""
    how = {"max_batch": max_batch, "kv_tokens": kv_tokens, "deterministic": True}
    return LLM(make_target(), drafter, k=None if drafter is None else 3, **how)


def start(llm: LLM, model: str = MODEL, **config: object) -> Running:
    listening = bind("127.0.0.1", 0)
    api = Api(llm, ServerConfig(model, **config))  # type: ignore[arg-type]
    server = Server(api)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    return Running(api, server, thread, f"http://127.0.0.1:{listening.getsockname()[1]}")


def ended_request(
    text: str = "", prompt: Iterable[int] = (), output: Iterable[int] = (), *,
    asked: int | None = None, logprobs: Iterable[TokenLogprob] = (),
) -> Any:  # fmt: skip
    """A request as answers are made of it; `asked` is the number of likely tokens for each."""
    ids = list(prompt)
    return SimpleNamespace(
        index=0, tokens=[*ids, *output], prompt_length=len(ids), output=list(output),
        text=SimpleNamespace(text=text), finish_reason="stop", logprobs=list(logprobs),
        params=SimpleNamespace(logprobs=asked),
    )  # fmt: skip


def until(true: Any) -> None:
    """Wait for what another thread brings about."""
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end, "it has not come about"
        time.sleep(0.01)


def all_free(running: Running) -> bool:
    engine = running.api.llm.engine
    pool = engine.scheduler.pool
    return running.api.worker.open == 0 and engine.idle and pool.free == pool.count


class Brake:
    """Stops the engine between rounds, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, step = threading.Event(), Engine.step
        self.go.set()
        self.steps = 0  # begun, the one that is stopped too
        self.last: int | None = None  # the step before which the engine stops by itself

        def braked(engine: Engine) -> None:
            self.steps += 1
            if self.steps == self.last:
                self.go.clear()
            self.go.wait(30)
            step(engine)

        monkeypatch.setattr(Engine, "step", braked)


Serve = Callable[..., Running]
