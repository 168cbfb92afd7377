"""Additions to the API reference: comments of attributes, and examples in docstrings."""

import re
from typing import Any

from griffe import Attribute, Docstring, Extension, Object

EXAMPLE = re.compile(r"(?:^>>> .*\n?)+", re.MULTILINE)


class Fields(Extension):
    """Give attributes without a docstring the comment after them; fence `>>>` examples."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(_fenced, obj.docstring.value)
        elif isinstance(obj, Attribute) and obj.endlineno is not None:
            line = obj.lines_collection[obj.filepath][obj.endlineno - 1]
            _, mark, comment = line.partition("  # ")
            if mark and not comment.startswith(("noqa", "type:", "fmt:")):
                obj.docstring = Docstring(comment, parent=obj)


def _fenced(example: re.Match[str]) -> str:
    lines = "\n".join(line.removeprefix(">>> ") for line in example[0].splitlines())
    return f"```python\n{lines}\n```\n"
