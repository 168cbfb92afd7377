"""Rules by which AWS's vLLM image reads its variables (github.com/aws/deep-learning-containers at
e0ecede, scripts/docker/vllm/sagemaker_args.py): SM_VLLM_A_B=value is vLLM's flag --a-b value.

`true` and an empty value are a bare flag, `false` is no flag. Each element of a JSON array is a
value; several JSON objects are a value each. Anything else, a single JSON object too, is one value.
"""

import json
from collections.abc import Mapping
from typing import Any

PREFIX = "SM_VLLM_"


def flags(environ: Mapping[str, str]) -> dict[str, list[str]]:
    """vLLM's flags by name, with their values; none: a bare flag."""
    found = {}
    for variable, value in environ.items():
        if variable.startswith(PREFIX) and value.strip().lower() != "false":
            name = variable.removeprefix(PREFIX).lower().replace("_", "-")
            found[name] = _values(value)
    return found


def _values(value: str) -> list[str]:
    text = value.strip()
    if text.lower() in ("", "true"):
        return []
    parts = _json_parts(text)
    return [value] if parts is None else [_text(part) for part in parts]


def _json_parts(text: str) -> list[Any] | None:
    """Elements of an array, or several objects; None for anything else."""
    decoder, objects, rest = json.JSONDecoder(), list[Any](), text
    try:
        if text.startswith("["):
            return list(json.loads(text))
        while rest.startswith("{"):
            found, end = decoder.raw_decode(rest)
            objects.append(found)
            rest = rest[end:].lstrip()
    except ValueError:
        return None
    return objects if len(objects) > 1 and not rest else None


def _text(element: Any) -> str:
    return element if isinstance(element, str) else json.dumps(element, separators=(",", ":"))
