"""Answers as `vllm serve` does, where the console is concerned: OpenAI's routes and /metrics."""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, StreamingResponse

from peagle.server.middleware import Pages
from peagle.server.run import bind

WORDS = ["The", " sky", " is", " blue", "."]
LABELS = 'engine="0",model_name="other"'


class LikeVllm:
    """Five words an answer; each has two rounds, in which four of six draft tokens stand."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.reason = "stop"
        self.go = threading.Event()  # on after the second word
        self.go.set()
        app = FastAPI()
        app.add_middleware(Pages)
        app.get("/v1/models")(self.models)
        app.post("/v1/chat/completions")(self.chat)
        app.get("/metrics")(self.metrics)
        listening = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        run = {"sockets": [listening]}
        self.thread = threading.Thread(target=self.server.run, kwargs=run, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.go.set()
        self.server.should_exit = True
        self.thread.join(30)

    def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "other", "object": "model", "owned_by": "vllm"}]}

    def metrics(self) -> PlainTextResponse:
        rounds = 2 * len(self.asked)
        counts = {"drafts": rounds, "draft_tokens": 3 * rounds, "accepted_tokens": 2 * rounds}
        lines = [
            f"vllm:spec_decode_num_{name}_total{{{LABELS}}} {float(count)}"
            for name, count in counts.items()
        ]
        places = enumerate([rounds, rounds // 2, rounds // 2])
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f'{name}{{{LABELS},position="{i}"}} {float(count)}' for i, count in places]
        lines += [f"vllm:num_requests_running{{{LABELS}}} 0.0"]
        lines += [f"vllm:generation_tokens_total{{{LABELS}}} {5.0 * len(self.asked)}"]
        return PlainTextResponse("\n".join(["# HELP of it", *lines, ""]))

    def chat(self, body: dict[str, Any]) -> StreamingResponse:
        self.asked.append(body)
        return StreamingResponse(self.events(), media_type="text/event-stream")

    def events(self) -> Iterator[str]:
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "other"}
        deltas = [{"role": "assistant", "content": ""}, *({"content": word} for word in WORDS), {}]
        for count, delta in enumerate(deltas):
            reason = None if delta else self.reason
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
            usage = {"prompt_tokens": 4, "completion_tokens": min(count, len(WORDS))}
            yield f"data: {json.dumps(head | {'choices': [choice], 'usage': usage})}\n\n"
            time.sleep(0.02)
            if count == 2:
                self.go.wait(30)
        yield f"data: {json.dumps(head | {'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"
