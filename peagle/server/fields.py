"""What the document tells of values that others check: the engine, and data/chat.py."""

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema


def number(**limits: float) -> Any:
    """A number whose limits the document tells; the engine checks them."""
    return Field(json_schema_extra=dict(limits))


TEXT = {"type": "string", "minLength": 1}
TOKEN = {"type": "integer", "minimum": 0}
TOKENS = {"type": "array", "items": TOKEN, "minItems": 1}
TEXTS = {"type": "array", "items": TEXT, "minItems": 1}
PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "user", "assistant", "tool"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": PART}]},
    },
    "required": ["role", "content"],
}
NAMED = {"type": "object", "properties": {"name": TEXT}, "required": ["name"]}
PARAMETERS = {"type": "object", "description": "A JSON schema."}
FUNCTION = NAMED | {"properties": {"name": TEXT, "parameters": PARAMETERS}}
TOOL = {"type": "object", "properties": {"function": FUNCTION}, "required": ["function"]}
# The first error of a list is enough: of a million wrong items, each would be described.
Texts = Annotated[list[str], Field(fail_fast=True)]
Ids = Annotated[list[int], Field(fail_fast=True)]
Tools = Annotated[
    list[dict[str, Any]],
    Field(max_length=128, fail_fast=True),
    WithJsonSchema({"type": "array", "items": TOOL, "maxItems": 128}),
]
Choice = Annotated[
    str | dict[str, Any],
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["auto", "none", "required"]},
                TOOL | {"properties": {"function": NAMED}},
            ]
        }
    ),
]
Prompts = Annotated[
    str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)],
    WithJsonSchema({"anyOf": [TEXT, TEXTS, TOKENS, {**TOKENS, "items": TOKENS}]}),
]
Messages = Annotated[
    list[dict[str, Any]],
    Field(min_length=1, max_length=2048, fail_fast=True),
    WithJsonSchema({"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": 2048}),
]
Stops = Annotated[
    str | Annotated[Texts, Field(max_length=128)],
    WithJsonSchema({"anyOf": [TEXT, {"type": "array", "items": TEXT, "maxItems": 128}]}),
]
TokenIds = Annotated[Ids, WithJsonSchema({"type": "array", "items": TOKEN})]
StopIds = Annotated[
    Ids,
    Field(max_length=1024),
    WithJsonSchema({"type": "array", "items": TOKEN, "maxItems": 1024}),
]
Most = Annotated[int | None, number(minimum=1)]
Bias = Annotated[
    dict[int, float],
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]
