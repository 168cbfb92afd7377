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
Tools = Annotated[list[dict[str, Any]], WithJsonSchema({"type": "array", "items": TOOL})]
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
    str | list[str] | list[int] | list[list[int]],
    WithJsonSchema({"anyOf": [TEXT, TEXTS, TOKENS, {**TOKENS, "items": TOKENS}]}),
]
Messages = Annotated[
    list[dict[str, Any]],
    Field(min_length=1),
    WithJsonSchema({"type": "array", "items": MESSAGE, "minItems": 1}),
]
Stops = Annotated[
    str | list[str], WithJsonSchema({"anyOf": [TEXT, {"type": "array", "items": TEXT}]})
]
TokenIds = Annotated[list[int], WithJsonSchema({"type": "array", "items": TOKEN})]
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
