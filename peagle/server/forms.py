"""What the answers of the two APIs look like, whole and in parts."""

from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from peagle.data.response_parser import HARMONY, answer_template
from peagle.engine.params import TokenLogprob
from peagle.engine.request import Request
from peagle.server.jobs import Said
from peagle.server.logprobs import of_chat, of_text
from peagle.server.tools import Spoken, ToolText


class Form(Protocol):
    """The choices of a response."""

    kind: str  # "object" of a whole response
    part_kind: str  # and of a streamed one
    prefix: str  # of ids

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a streamed choice begins with."""

    def part(self, said: Said) -> dict[str, Any]:
        """A streamed choice of what a round has brought."""

    def whole(self, request: Request) -> dict[str, Any]:
        """The choice of a request that has ended."""


class TextForm:
    """/v1/completions."""

    kind = part_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._offsets = tokenizer, dict[int, int]()

    def opening(self, _index: int) -> None:
        """Nothing."""

    def part(self, said: Said) -> dict[str, Any]:
        """Its text may be empty, at the end."""
        text = "".join(chunk.text for chunk in said.chunks)
        tokens, offset = _tokens(said), self._offsets.get(said.index, 0)
        shown = of_text(self._tokenizer, tokens, offset) if tokens else None
        if shown:
            self._offsets[said.index] = offset + sum(map(len, shown["tokens"]))
        reason = said.ended.finish_reason if said.ended else None
        return {"index": said.index, "text": text, "logprobs": shown, "finish_reason": reason}

    def whole(self, request: Request) -> dict[str, Any]:
        """With log-probabilities where they were asked for."""
        asked = request.params.logprobs is not None
        return {
            "index": request.index,
            "text": request.text.text,
            "logprobs": of_text(self._tokenizer, request.logprobs, 0) if asked else None,
            "finish_reason": request.finish_reason,
        }


class ChatForm:
    """/v1/chat/completions. `most_calls` tool calls are looked for, None being any number; 0 where
    no tools were offered. Answers in harmony come whole, at the end: their text has no marks of
    what is thought and what is said."""

    kind, part_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, most_calls: int | None) -> None:
        self._tokenizer, self._most_calls = tokenizer, most_calls
        self._texts = dict[int, ToolText]()
        self._apart = most_calls != 0 or answer_template(tokenizer) is HARMONY

    def opening(self, index: int) -> dict[str, Any]:
        """Who speaks."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, said: Said) -> dict[str, Any]:
        """Tool calls come whole, at the end."""
        text = "".join(chunk.text for chunk in said.chunks)
        reason = said.ended.finish_reason if said.ended else None
        delta = dict[str, Any]()
        if self._apart:
            own = self._texts.setdefault(said.index, ToolText(self._tokenizer))
            text = own.push(text)
            if said.ended:
                rest = self._finish(own, said.ended)
                text += rest.text
                if rest.thought:
                    delta["reasoning"] = rest.thought
                if rest.calls:
                    delta["tool_calls"] = [{"index": i} | call for i, call in enumerate(rest.calls)]
                    reason = "tool_calls"  # type: ignore[assignment]
        if text:
            delta["content"] = text
        tokens = _tokens(said)
        shown = of_chat(self._tokenizer, tokens) if tokens else None
        return {"index": said.index, "delta": delta, "logprobs": shown, "finish_reason": reason}

    def whole(self, request: Request) -> dict[str, Any]:
        """A message, and why it ended."""
        message: dict[str, Any] = {"role": "assistant", "content": request.text.text}
        reason: str | None = request.finish_reason
        if self._apart:
            own = ToolText(self._tokenizer)
            certain = own.push(request.text.text)
            rest = self._finish(own, request)
            message["content"] = certain + rest.text
            if rest.thought:
                message["reasoning"] = rest.thought
            if rest.calls:
                message["content"] = message["content"].strip() or None
                message["tool_calls"], reason = rest.calls, "tool_calls"
        asked = request.params.logprobs is not None
        return {
            "index": request.index,
            "message": message,
            "logprobs": of_chat(self._tokenizer, request.logprobs) if asked else None,
            "finish_reason": reason,
        }

    def _finish(self, own: ToolText, request: Request) -> Spoken:
        prompt = request.tokens[: request.prompt_length]
        text, calls, thought = own.finish(prompt, request.output)
        return Spoken(text, calls[: self._most_calls], thought)


def _tokens(said: Said) -> list[TokenLogprob]:
    return [chunk.logprob for chunk in said.chunks if chunk.logprob is not None]
