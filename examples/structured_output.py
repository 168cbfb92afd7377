"""Get answers that a program can read: by a JSON schema, and by a regular expression.

python examples/structured_output.py
"""

import json

from peagle import LLM, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "language": {"enum": ["Python", "C", "Rust"]},
        "lines": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["language", "lines"],
    "additionalProperties": False,
}

llm = LLM("smollm2-135m", head="heads/smollm2-135m-p-eagle")

# Draft tokens follow the grammar, too. So they are accepted at least as often as in free text.
as_json = SamplingParams(json_schema=SCHEMA, max_tokens=256)
answer = llm.generate(["A program as JSON: "], as_json)[0]
program = json.loads(answer.text)
print(program["language"], program["lines"])

as_date = SamplingParams(regex=r"\d{4}-\d{2}-\d{2}", max_tokens=16)
print(llm.generate(["The first moon landing was on "], as_date)[0].text)
