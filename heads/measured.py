"""Choose the answers that heads are measured on while they train: 16 of code, 6 of each other kind.

    python heads/measured.py prompts/held_out.jsonl held_out.jsonl measured.jsonl

Reads prompts of every kind and the target's greedy answers to them; of a dialogue the last one.
"""

import json
import sys
from pathlib import Path

from peagle.data.records import read_records

CODE, CODE_COUNT, COUNT = "completion", 16, 6


def main() -> None:
    prompts, answers, output = map(Path, sys.argv[1:])
    kinds = [record["kind"] for record in read_records(prompts)]
    answered = {record["record"]: record for record in read_records(answers)}
    chosen = []
    for kind in dict.fromkeys(kinds):
        numbers = [number for number in answered if kinds[number] == kind]
        chosen += sorted(numbers)[: CODE_COUNT if kind == CODE else COUNT]
    lines = [json.dumps(answered[number], ensure_ascii=False) + "\n" for number in sorted(chosen)]
    output.write_text("".join(lines))
    print(f"{output}: {len(lines)} answers")


if __name__ == "__main__":
    main()
