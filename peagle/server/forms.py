"""What the answers of the two APIs look like, whole and in parts.

A form makes the choices of a response: `opening` is what a streamed choice begins with, `part` what
a round adds to it, `whole` the choice of a request that has ended. Until a request has ended, only
its index is read.
"""

from collections import defaultdict
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from peagle.engine.params import TokenLogprob
from peagle.engine.request import Request
from peagle.model.thoughts import THINKING, answer_template
from peagle.server.logprobs import AnswerLogprobs, of_chat, of_text
from peagle.server.thoughts import ThoughtParser
from peagle.server.tools import ParsedAnswer, ResponseParser

Choice = dict[str, Any]
Logprobs = list[TokenLogprob] | None


class TextForm:
    """/v1/completions."""

    kind = part_kind = "text_completion"  # "object" of a response, and of a streamed part
    prefix = "cmpl"  # of ids

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._logprobs = defaultdict[int, AnswerLogprobs](partial(AnswerLogprobs, tokenizer))

    def opening(self, _index: int) -> None:
        """Nothing."""

    def part(self, request: Request, text: str, logprobs: Logprobs, ended: bool) -> Choice:
        """Its text may be empty, at the end."""
        shown = None
        if logprobs is not None:
            tokens = self._logprobs[request.index].push(logprobs, text, ended)
            shown = of_text(tokens) if tokens else None
        reason = request.finish_reason if ended else None
        return {"index": request.index, "text": text, "logprobs": shown, "finish_reason": reason}

    def whole(self, request: Request, text: str, logprobs: Logprobs) -> Choice:
        """The only part."""
        return self.part(request, text, logprobs, ended=True)


class ChatForm:
    """/v1/chat/completions. `most_calls` tool calls are looked for, None being any number; 0 where
    no tools were offered. What a response template parses comes whole, at the end."""

    kind = "chat.completion"
    part_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, most_calls: int | None) -> None:
        self._tokenizer = tokenizer
        self._logprobs = defaultdict[int, AnswerLogprobs](partial(AnswerLogprobs, tokenizer))
        self._most_calls = most_calls
        fields = (answer_template(tokenizer) or {}).get("fields", {})
        self._parses = most_calls != 0 or any(name in fields for name in THINKING)
        self._texts = defaultdict[int, ResponseParser](partial(ResponseParser, tokenizer))
        self.answers([])

    def answers(self, prompt: list[int]) -> None:
        """The prompt of the answers, which may begin their thoughts."""
        new = partial(ThoughtParser, self._tokenizer, prompt)
        self._thoughts = defaultdict[int, ThoughtParser](new)

    def opening(self, index: int) -> Choice:
        """The role."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, request: Request, text: str, logprobs: Logprobs, ended: bool) -> Choice:
        """Tool calls come whole, at the end."""
        answer = self._parse(request, text, ended)
        reason: str | None = request.finish_reason if ended else None
        delta = dict[str, Any]()
        if answer.text:
            delta["content"] = answer.text
        if answer.reasoning:
            delta["reasoning"] = answer.reasoning
        if answer.calls:
            delta["tool_calls"] = [{"index": i} | call for i, call in enumerate(answer.calls)]
            reason = "tool_calls"
        shown = None
        if logprobs is not None:
            tokens = self._logprobs[request.index].push(logprobs, text, ended)
            shown = of_chat(tokens) if tokens else None
        return {"index": request.index, "delta": delta, "logprobs": shown, "finish_reason": reason}

    def whole(self, request: Request, text: str, logprobs: Logprobs) -> Choice:
        """The only part, as a message; its tool calls have no index."""
        choice = self.part(request, text, logprobs, ended=True)
        message = {"role": "assistant", "content": "", **choice.pop("delta")}
        if "tool_calls" in message:
            message["content"] = message["content"].strip() or None
            for call in message["tool_calls"]:
                del call["index"]
        return choice | {"message": message}

    def _parse(self, request: Request, text: str, ended: bool) -> ParsedAnswer:
        thinker, parser = self._thoughts[request.index], self._texts[request.index]
        thoughts, text = thinker.push(text, request.output if ended else None)
        if not self._parses:
            return ParsedAnswer(text, [], thoughts)
        text = parser.push(text)
        if not ended:
            return ParsedAnswer(text, [], thoughts)
        prompt = request.tokens[: request.prompt_length]
        parsed = parser.finish(prompt, request.output[thinker.length :])
        calls = parsed.calls[: self._most_calls]
        return ParsedAnswer(text + parsed.text, calls, thoughts + parsed.reasoning)


Form = TextForm | ChatForm
