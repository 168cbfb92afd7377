"""Grammars that are hard to compile, by size. Each is the `structured_outputs` of a request."""

import json
import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]


def chained(name: str, size: int) -> str:
    """Lark: each rule (lower case) or terminal (upper case) needs the next one."""
    links = (f'{name}{i}: "a" {name}{i + 1}' for i in range(size))
    return "\n".join([f"start: {name}0", *links, f'{name}{size}: "b"'])


def many_rules(size: int) -> str:
    """Lark: alternatives, each a rule of its own."""
    rules = (f'r{i}: "a{i}"' for i in range(size))
    return "\n".join(["start: " + " | ".join(f"r{i}" for i in range(size)), *rules])


def nested_rules(size: int) -> str:
    return "start: " + "(" * size + '"a"' + ")" * size


def chained_definitions(size: int) -> Schema:
    """Each definition refers to the next one."""
    links = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(size)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{size}": {"type": "null"}}}


def any_of_references(size: int) -> Schema:
    """Definitions in a ring, all of them alternatives."""
    ring = {}
    for i in range(size):
        following = {"$ref": f"#/$defs/d{(i + 1) % size}"}
        ring[f"d{i}"] = {"anyOf": [{"type": "string"}, following]}
    return {"anyOf": [{"$ref": f"#/$defs/d{i}"} for i in range(size)], "$defs": ring}


def nested_schema(size: int, kind: str = "object") -> Schema:
    schema: Schema = {"type": "null"}
    for _ in range(size):
        inside = {"properties": {"a": schema}} if kind == "object" else {"items": schema}
        schema = {"type": kind, **inside}
    return schema


def patterns(size: int) -> Schema:
    """Patterns of names, each compared with every other one."""
    named = {f"^(a|b){{{i + 1},}}c{i}$": {"type": "string"} for i in range(size)}
    return {"type": "object", "patternProperties": named}


def all_of(size: int) -> Schema:
    parts = [{"properties": {"p": {"type": "string", "pattern": f"a{{{i}}}"}}} for i in range(size)]
    return {"allOf": parts}


def required(size: int) -> Schema:
    named = {f"p{i}": {"type": "string"} for i in range(size)}
    return {"type": "object", "properties": named, "required": list(named)}


# name: what it makes, and the sizes: below the limits, around them, far above.
GRAMMARS: dict[str, tuple[str, Callable[[int], Any], tuple[int, ...]]] = {
    "chained rules": ("grammar", lambda n: chained("r", n), (300, 1000, 6000, 20000)),
    "chained terminals": ("grammar", lambda n: chained("T", n), (300, 1000, 4000, 20000)),
    "many rules": ("grammar", many_rules, (900, 5000, 20000)),
    "nested rules": ("grammar", nested_rules, (50, 5000, 50000)),
    "chained definitions": ("json", chained_definitions, (300, 900, 1200, 5000)),
    "references": ("json", any_of_references, (300, 900, 3000)),
    "nested objects": ("json", nested_schema, (20, 60, 150)),
    "nested lists": ("json", lambda n: nested_schema(n, "array"), (20, 60, 400)),
    "patterns of names": ("json", patterns, (20, 60, 200)),
    "all of": ("json", all_of, (20, 200)),
    "required names": ("json", required, (1000, 5000, 20000)),
    "values": ("json", lambda n: {"enum": [f"value {i}" for i in range(n)]}, (10000, 100000)),
    "choices": ("choice", lambda n: [f"choice {i}" for i in range(n)], (5000, 50000)),
    "counts": ("regex", lambda n: f"((a{{{n}}}){{{n}}}){{{n}}}", (10, 100, 1000)),
    "parentheses": ("regex", lambda n: "(" * n + "a" + ")" * n, (200, 500, 20000)),
    "a large automaton": ("regex", lambda n: f"(a|b)*a(a|b){{{n}}}", (20, 100, 1000)),
    "words": ("regex", lambda n: "|".join(f"w{i}x*" for i in range(n)), (1000, 20000, 100000)),
}


def fixed() -> list[tuple[str, dict[str, Any]]]:
    """All of the above: a name, and `structured_outputs`."""
    made = []
    for name, (field, make, sizes) in GRAMMARS.items():
        made += [(f"{size} {name}", {field: make(size)}) for size in sizes]
    return made


def drawn(count: int, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """The same at sizes that are drawn, and grammars put together of drawn parts."""
    choose = random.Random(seed)
    made = []
    for number in range(count):
        if number % 2:
            made.append((f"drawn {number}", {"grammar": _drawn_lark(choose)}))
            continue
        name, (field, make, sizes) = choose.choice(list(GRAMMARS.items()))
        size = int(choose.uniform(0.5, 1.5) * choose.choice(sizes)) + 1
        made.append((f"{size} {name}", {field: make(size)}))
    return made


def _drawn_lark(choose: random.Random) -> str:
    """Rules and terminals that use each other, themselves, regular expressions and schemas."""
    size = choose.choice((3, 30, 300, 900))
    names = ["start"] + [choose.choice("rT") + str(i) for i in range(size)]
    lines = []
    for name in names:
        terminal = name.isupper() or name[0] == "T"
        usable = [each for each in names[1:] if each[0] == "T" or not terminal]
        parts = []
        for _ in range(choose.randint(1, 4)):
            word = json.dumps("".join(choose.choices("ab \\u00e9", k=3)))
            used = choose.sample(usable, min(3, len(usable)))
            parts += choose.choices([word, "/[a-z]{1,30}(x|y)*/", *used])
            parts[-1] += choose.choice(["", "", "?", "*", "+", "{2,9}"])
        lines.append(f"{name}: {choose.choice([' ', ' | ']).join(parts)}")
    return "\n".join(lines)
