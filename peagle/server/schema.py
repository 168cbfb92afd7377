"""Bodies of requests: the fields of OpenAI's API and of vLLM's additions that are supported.

Unknown fields are ignored, for clients send many. Refused by name are unsupported ones that would
change the answer, and such that are nearly the name of another.
"""

import json
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from peagle.data.chat import ROLES
from peagle.engine.params import SamplingParams
from peagle.errors import InputError, shortened
from peagle.server.tools import named

NEAR = 0.8  # of difflib: "temprature" is "temperature", "metadata" is nothing
MAX_NEAR = 32  # unknown names that are compared with the known ones, and letters of such a name
IGNORED = {"add_special_tokens", "models"}  # other servers' fields, however near
MOST_ITEMS = 16384  # of a list, unless it holds token ids
STRUCTURED = "use structured_outputs"
# Fields of Generation that SamplingParams has under the same name and in the same form.
SAME = {"temperature", "top_p", "min_p", "seed", "ignore_eos", "n"}
SAME |= {"presence_penalty", "frequency_penalty", "repetition_penalty"}
# Field: (values that ask for nothing, what to do instead).
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "echo": ((False,), "prompts are not repeated, leave it out"),
    "suffix": (("",), "text is only continued, leave it out"),
    "best_of": ((1,), "answers are not ranked, use n"),
    "use_beam_search": ((False,), "there is no beam search, leave it out"),
    "prompt_logprobs": ((), "only answers have log-probabilities, leave it out"),
    "min_tokens": ((0,), "not supported, leave it out"),
    "bad_words": (([],), "not supported, use logit_bias"),
    "allowed_token_ids": (([],), "not supported, use logit_bias"),
    "logits_processors": (([],), "not supported, leave it out"),
    "include_stop_str_in_output": ((False,), "stop strings are cut, leave it out"),
    "skip_special_tokens": ((True,), "special tokens have no text, leave it out"),
    "truncate_prompt_tokens": ((), "prompts are not cut, shorten them"),
    "continue_final_message": ((False,), "an answer begins anew, leave it out"),
    "add_generation_prompt": ((True,), "an answer always follows, leave it out"),
    "chat_template": ((), "it is chosen when the server starts, leave it out"),
    "functions": (([],), "deprecated, use tools"),
    "function_call": (("none", "auto"), "deprecated, use tool_choice"),
    "modalities": ((["text"],), "answers are text, leave it out"),
    "audio": ((), "answers are text, leave it out"),
    "web_search_options": ((), "there is no web search, leave it out"),
    "guided_json": ((), STRUCTURED),
    "guided_regex": ((), STRUCTURED),
    "guided_choice": ((), STRUCTURED),
    "guided_grammar": ((), STRUCTURED),
}


class UnknownField(InputError):
    """A field that is taken for another one's misspelled name."""

    def __init__(self, field: str, near: str) -> None:
        super().__init__(f"{field}: no such field, did you mean {near}?")
        self.field = field


def told(**schema: Any) -> Any:
    """Limits that the document tells, and others check: the engine, and data/chat.py."""
    return Field(json_schema_extra=schema)


def an_object(**properties: Any) -> dict[str, Any]:
    """The JSON schema of an object that has at least these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


NAME = {"type": "string", "minLength": 1}
PART = an_object(type={"const": "text"}, text={"type": "string"})
CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": PART}]}
ROLE = {"enum": list(ROLES)}
NAMED = an_object(function=an_object(name=NAME))
WAYS = {"enum": ["auto", "none", "required"]}

# The first error of a list is enough: of a million wrong items, each would be described.
FIRST = Field(fail_fast=True)
Text = Annotated[str, told(minLength=1)]
Texts = Annotated[list[Text], FIRST]
Token = Annotated[int, told(minimum=0)]
Tokens = Annotated[list[Token], FIRST]
Count = Annotated[int | None, told(minimum=1)]
Bias = Annotated[float, told(minimum=-100, maximum=100)]
Biases = Annotated[dict[int, Bias], told(propertyNames={"pattern": "^[0-9]+$"})]
Message = Annotated[dict[str, Any], WithJsonSchema(an_object(role=ROLE, content=CONTENT))]
Messages = Annotated[list[Message], Field(min_length=1, max_length=2048, fail_fast=True)]
Tool = Annotated[dict[str, Any], WithJsonSchema(NAMED)]


class Body(BaseModel):
    """A body, or a part of one; null is as good as nothing."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])
            raise InputError(f"the body has {half}: half of a character, send it whole") from error
        except RecursionError as error:
            raise InputError("the body is nested too deeply: make it less deep") from error
        data = {name: value for name, value in data.items() if value is not None}
        for name, value in data.items():
            long = isinstance(value, list) and len(value) > MOST_ITEMS
            if long and not isinstance(value[0], int):
                raise InputError(f"{name}: {len(value)} items, at most {MOST_ITEMS}: ask for fewer")
        for name, (harmless, instead) in REFUSED.items():
            if name in data and name not in cls.model_fields and data[name] not in harmless:
                shown = shortened(repr(data[name]))
                raise InputError(f"{name} {shown}: {instead}")
        known = {field.alias or name for name, field in cls.model_fields.items()} | set(REFUSED)
        unknown = [name for name in data if name not in known | IGNORED and len(name) <= MAX_NEAR]
        for name in unknown[:MAX_NEAR]:
            if near := get_close_matches(name.lower(), known, 1, NEAR):
                raise UnknownField(name, near[0])
        return data


class StreamOptions(Body):
    """What a stream holds besides."""

    include_usage: bool = False
    peagle_drafts: bool = False  # which text was drafted, and at which place of its draft


class JsonSchema(Body):
    """A schema, and names that we do not need."""

    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """OpenAI's: which form the answer has."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

    def constraint(self) -> dict[str, Any]:
        """Fields of SamplingParams."""
        if self.type == "json_object":
            return {"json_schema": {"type": "object"}}
        if self.type == "text":
            return {}
        if self.json_schema is None:
            raise InputError('response_format: a json_schema has {"schema": ...}, give one')
        return {"json_schema": self.json_schema.schema_}


class StructuredOutputs(Body):
    """vLLM's."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool = False
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
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
            raise InputError("structured_outputs: an answer has one form, leave the others out")
        return dict(given)


class Generation(Body):
    """What completions and conversations have in common."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Annotated[int, Field(ge=1, le=128)] = 1
    temperature: Annotated[float, told(minimum=0, maximum=100)] = 1.0
    top_p: Annotated[float, told(exclusiveMinimum=0, maximum=1)] = 1.0
    top_k: Annotated[int, told(minimum=-1)] = 0
    min_p: Annotated[float, told(minimum=0, maximum=1)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Count = None
    stop: Text | Annotated[Texts, Field(max_length=128)] = []
    stop_token_ids: Annotated[Tokens, Field(max_length=1024)] = []
    ignore_eos: bool = False
    presence_penalty: Annotated[float, told(minimum=-2, maximum=2)] = 0.0
    frequency_penalty: Annotated[float, told(minimum=-2, maximum=2)] = 0.0
    repetition_penalty: Annotated[float, told(minimum=0.01, maximum=100)] = 1.0
    logit_bias: Biases = {}
    response_format: ResponseFormat = ResponseFormat()
    structured_outputs: StructuredOutputs = StructuredOutputs()

    @property
    def top(self) -> int | None:
        """Likely tokens beside each token's own log-probability; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def longest(self) -> tuple[str, int | None]:
        """The field for the tokens of an answer, at most, and its value; None: as many as fit."""
        return "max_tokens", self.max_tokens

    def params(self, room: int) -> SamplingParams:
        """As the engine has it, with room for so many tokens. Raises InputError for values that are
        out of range."""
        stop = self.stop
        field, longest = self.longest
        if field in self.model_fields_set and longest is not None and longest > room > 0:
            why = f"the context has room for {room} tokens after the prompt, ask for fewer"
            raise InputError(f"{field} {longest}: {why}")
        return SamplingParams(
            **self.model_dump(include=SAME),
            **self.constraint(),
            top_k=0 if self.top_k == -1 else self.top_k,  # vLLM's other way to say all
            max_tokens=max(1, room) if longest is None else longest,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids),
            logit_bias=self.logit_bias or None,
            logprobs=self.top,
        )

    def constraint(self) -> dict[str, Any]:
        """Fields of SamplingParams that say which form the answer has."""
        form, other = self.response_format.constraint(), self.structured_outputs.constraint()
        if form and other:
            raise InputError("response_format and structured_outputs: leave one of them out")
        return form or other

    @property
    def form_field(self) -> str:
        """The field that says which form the answer has, where one does."""
        return "structured_outputs" if self.response_format.type == "text" else "response_format"


class CompletionBody(Generation):
    """POST /v1/completions."""

    prompt: Text | Texts | Tokens | Annotated[list[Tokens], FIRST]
    max_tokens: Count = 16  # OpenAI's default
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def top(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """Each a text, or token ids."""
        if not self.prompt:
            raise InputError(f"prompt {self.prompt!r}: is empty, give a text or token ids")
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class ChatBody(Generation):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Count = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] = []
    tool_choice: Annotated[str, WithJsonSchema(WAYS)] | Tool = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None  # as GPT-OSS's template has it

    @property
    def template_args(self) -> dict[str, Any]:
        effort = self.reasoning_effort
        return self.chat_template_kwargs | ({} if effort is None else {"reasoning_effort": effort})

    @property
    def top(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def longest(self) -> tuple[str, int | None]:
        newer = self.max_completion_tokens
        return super().longest if newer is None else ("max_completion_tokens", newer)

    @property
    def form_field(self) -> str:
        forced = self.tool_choice not in ("auto", "none")
        return "tool_choice" if forced else super().form_field

    def offered(self) -> list[dict[str, Any]]:
        """Tools that the target is told of."""
        return [] if self.tool_choice == "none" else self.tools

    def forced(self) -> list[dict[str, Any]]:
        """Tools of which one must be called."""
        choice = self.tool_choice
        if choice in ("auto", "none"):
            return []
        tools = {named(tool): tool for tool in self.tools}
        if isinstance(choice, dict):
            wanted = [named(choice, "tool_choice")]
        elif choice == "required":
            wanted = list(tools)
        else:
            allowed = "'auto', 'none', 'required' or a function"
            raise InputError(f"tool_choice {choice!r}: must be {allowed}")
        found = [tool for name, tool in tools.items() if name in wanted]
        if not found:
            there = ", ".join(tools) or "none"
            raise InputError(f"tool_choice {choice!r}: is not among the tools, there are {there}")
        if self.constraint():
            raise InputError("tool_choice: an answer has one form, leave the other out")
        return found


class TokenizeBody(Body):
    """POST /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Tokens
