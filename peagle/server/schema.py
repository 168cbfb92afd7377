"""Bodies of requests: the fields of OpenAI's API and of vLLM's additions that are supported.

Unknown fields are ignored, since clients send many. An unsupported field that would change the
answer is refused, and so is a name close to a known one.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator
from transformers import PreTrainedTokenizerBase

from peagle.catalog import did_you_mean
from peagle.data.chat import ROLES
from peagle.engine.params import CONSTRAINTS, SamplingParams
from peagle.errors import InputError, shortened
from peagle.server.conversations import call_grammar, tool_name
from peagle.server.responses import ApiError

NEAR = 0.8  # difflib's ratio: "temprature" is near "temperature", "metadata" is near nothing
MAX_NEAR = 32  # unknown names that are compared with the known ones, and letters of such a name
# Fields of other servers, although near to a known one.
IGNORED = {"models", "parse_tool_calls", "reasoning_format"}
# Fields of Generation that SamplingParams has under the same name and in the same form.
SAME = {"temperature", "top_p", "min_p", "seed", "ignore_eos", "n"}
SAME |= {"presence_penalty", "frequency_penalty", "repetition_penalty"}
REFUSED = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())


def _object(**properties: Any) -> dict[str, Any]:
    """The JSON schema of an object with these required properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


# For the document only: the chat template and data/chat.py check messages, call_grammar tools.
PART = _object(type={"const": "text"}, text={"type": "string"})
CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": PART}]}
MESSAGE = _object(role={"enum": list(ROLES)}, content=CONTENT)
TOOL = _object(function=_object(name={"type": "string", "minLength": 1}))

# The first error of a list is enough: of a million wrong items, each would be described.
FIRST = Field(fail_fast=True)
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], FIRST]
Token = Annotated[int, Field(ge=0)]
Tokens = Annotated[list[Token], FIRST]
Lists = Annotated[list[Tokens], FIRST]
Count = Annotated[int | None, Field(ge=1)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Message = Annotated[dict[str, Any], WithJsonSchema(MESSAGE)]
Messages = Annotated[list[Message], Field(min_length=1, max_length=2048, fail_fast=True)]
Tool = Annotated[dict[str, Any], WithJsonSchema(TOOL)]
Logprobs = Annotated[int, Field(ge=0, le=20)]


class Body(BaseModel):
    """A body, or a part of one; null counts as left out."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = {name: value for name, value in data.items() if value is not None}
        for name, value in data.items():
            _check_json(name, value)
        for name, entry in REFUSED.items():
            harmless = name not in data or data[name] in entry.get("harmless", ())
            if not harmless and name not in cls.model_fields:
                fix = entry.get("fix", "leave it out")
                raise InputError(entry["why"], field=name, value=data[name], fix=fix)
        known = {field.alias or name for name, field in cls.model_fields.items()} | set(REFUSED)
        unknown = [name for name in data if name not in known | IGNORED and len(name) <= MAX_NEAR]
        for name in unknown[:MAX_NEAR]:
            if near := did_you_mean(name, known, NEAR):
                raise InputError("no such field", field=name, fix=near)
        return data

    def field_of(self, name: str | None) -> str:
        """The field of this body that an engine's error about `name` is about."""
        if name is not None and name.partition("[")[0] in type(self).model_fields:
            return name
        return "messages" if "messages" in self.model_fields_set else "prompt"

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Turn an InputError into an ApiError that names a field of this body."""
        try:
            yield
        except InputError as error:
            field = self.field_of(error.field)
            raise ApiError(400, error.named(field), param=field) from error


def _check_json(name: str, value: Any) -> None:
    """Raise InputError for a field that cannot be written as JSON again."""
    field = shortened(ascii(name)[1:-1])
    try:
        json.dumps([name, value], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        why = "contains half of a character (an unpaired surrogate)"
        raise InputError(why, field=field, fix="send it whole") from error
    except RecursionError as error:
        raise InputError("is nested too deeply", field=field, fix="make it less deep") from error


class StreamOptions(Body):
    """Optional parts of a stream."""

    include_usage: bool = False
    peagle_drafts: bool = False  # which text was drafted, and at which depth of its draft


class JsonSchema(Body):
    """A schema; its name and other fields are ignored."""

    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """OpenAI's structured output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def constraint(self) -> dict[str, Any]:
        """Fields of SamplingParams."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            why = "type json_schema and a json_schema go together"
            raise InputError(why, field="response_format", fix="give both or neither")
        if self.json_schema is not None:
            return {"json_schema": self.json_schema.schema_}
        return {"json_schema": {"type": "object"}} if self.type == "json_object" else {}


class StructuredOutputs(Body):
    """vLLM's structured output."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool = False
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=16384)] | None = None
    grammar: str | None = None  # Lark

    def constraint(self) -> dict[str, Any]:
        """Fields of SamplingParams."""
        asked = {"json_schema": self.json_, "regex": self.regex, "grammar": self.grammar}
        given = [(name, value) for name, value in asked.items() if value is not None]
        if self.choice is not None:
            # One terminal: a rule may have no more than 2,000 alternatives.
            alternatives = " | ".join(map(json.dumps, self.choice))
            given.append(("grammar", f"start: CHOICE\nCHOICE: {alternatives}"))
        if self.json_object:
            given.append(("json_schema", {"type": "object"}))
        if len(given) > 1:
            why = "json, json_object, regex, choice and grammar exclude each other"
            raise InputError(why, field="structured_outputs", fix="give one")
        return dict(given)


class Generation(Body):
    """The common fields of completions and conversations."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Annotated[int, Field(ge=1, le=128)] = 1
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Count = None
    stop: Text | Annotated[list[Text], Field(max_length=128, fail_fast=True)] = []
    stop_token_ids: Annotated[list[Token], Field(max_length=1024, fail_fast=True)] = []
    ignore_eos: bool = False
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    logit_bias: dict[int, Bias] = {}
    response_format: ResponseFormat = ResponseFormat(type="text")
    structured_outputs: StructuredOutputs = StructuredOutputs()
    _grammar: str | None = None  # in place of both, where calls are constrained

    @property
    def top(self) -> int | None:
        """Number of top log-probabilities for each token; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def length_field(self) -> str:
        """The field with the maximum number of tokens of an answer."""
        return "max_tokens"

    @property
    def form_field(self) -> str:
        """The field that constrains the answer's form, where one does."""
        return "structured_outputs" if self.response_format.type == "text" else "response_format"

    def field_of(self, name: str | None) -> str:
        if name in CONSTRAINTS:
            return self.form_field
        return self.length_field if name == "max_tokens" else super().field_of(name)

    def params(self, room: int) -> SamplingParams:
        """The engine's parameters, with room for `room` tokens after the prompt. Raises InputError
        for values that are out of range or exclude each other."""
        if self.stream_options.peagle_drafts and not self.stream:
            raise InputError("peagle_drafts needs `stream`", field="stream_options", fix="set it")
        longest = getattr(self, self.length_field)
        if self.length_field in self.model_fields_set and longest and longest > room > 0:
            why = f"the context has room for {room} tokens after the prompt"
            raise InputError(why, field=self.length_field, value=longest, fix="ask for fewer")
        return SamplingParams(
            **self.model_dump(include=SAME),
            **self.constraint(),
            top_k=max(0, self.top_k),  # -1 means all tokens, too
            max_tokens=longest or max(1, room),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            logit_bias=self.logit_bias or None,
            logprobs=self.top,
        )

    def constraint(self) -> dict[str, Any]:
        """Fields of SamplingParams that constrain the answer's form."""
        form = self.response_format.constraint()
        other = self.structured_outputs.constraint()
        if form and other:
            why = "excludes `structured_outputs`"
            raise InputError(why, field="response_format", fix="leave one of them out")
        return {"grammar": self._grammar} if self._grammar else form or other


class CompletionBody(Generation):
    """POST /v1/completions."""

    prompt: Annotated[Text | Texts | Tokens | Lists, Field(min_length=1)]
    max_tokens: Count = 16  # OpenAI's default
    logprobs: Logprobs | None = None

    @property
    def top(self) -> int | None:
        return self.logprobs

    def field_of(self, name: str | None) -> str:
        field = super().field_of(name)
        return field if len(self.prompts()) > 1 else field.partition("[")[0]

    def prompts(self) -> list[str | list[int]]:
        """Each prompt as a text, or as token ids."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class ChatBody(Generation):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Count = None
    logprobs: bool = False
    top_logprobs: Logprobs = 0
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] = []
    tool_choice: Literal["auto", "none", "required"] | Tool = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None  # as GPT-OSS's template has it; "none": no thoughts
    add_special_tokens: Literal[False] = False  # the template writes them

    def template_args(self, template: str) -> dict[str, Any]:
        """Further arguments of a chat template. Clients send an effort to any target: a template
        that does not read it gets none."""
        effort = self.reasoning_effort
        meant = {"reasoning_effort": effort, "enable_thinking": False if effort == "none" else None}
        read = {n: value for n, value in meant.items() if value is not None and n in template}
        return self.chat_template_kwargs | read

    @property
    def top(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise InputError("needs `logprobs`", field="top_logprobs", fix="set it to true")
        return self.top_logprobs if self.logprobs else None

    @property
    def length_field(self) -> str:
        return "max_completion_tokens" if self.max_completion_tokens else super().length_field

    @property
    def form_field(self) -> str:
        return super().form_field if self.tool_choice in ("auto", "none") else "tools"

    def offered(self) -> list[dict[str, Any]]:
        """Tools that the chat template shows to the target."""
        return [] if self.tool_choice == "none" else self.tools

    def constrain_calls(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Have calls follow a grammar where one must be made, or where the answer has a form."""
        if tools := self._constrained_tools():
            several = self.parallel_tool_calls and isinstance(self.tool_choice, str)
            form = self.response_format.constraint().get("json_schema")
            self._grammar = call_grammar(tokenizer, tools, several, form)

    def _constrained_tools(self) -> list[dict[str, Any]]:
        """Tools of which one must be called, or that may be in place of an answer with a form."""
        choice = self.tool_choice
        if choice in ("auto", "none"):
            return self.offered() if self.response_format.type != "text" else []
        tools = {tool_name(tool, "tools"): tool for tool in self.tools}
        name = tool_name(choice, "tool_choice") if isinstance(choice, dict) else None
        found = [tool for each, tool in tools.items() if name in (each, None)]
        if not found:
            why = f"is not among the tools, there are {', '.join(tools) or 'none'}"
            raise InputError(why, field="tool_choice", value=name or choice, fix="add it to tools")
        if self.constraint():
            why = "excludes `response_format` and `structured_outputs`"
            raise InputError(why, field="tool_choice", fix="leave one of them out")
        return found
