"""Constrained output: are answers valid, and are drafts accepted as without a schema?

    python benchmarks/grammar.py [--schemas 100] [--k 3] [--max-tokens 128] [--batch 8]

Each generated schema is asked for in words, through the chat template, greedy; the same prompts are
answered once under the schema and once freely. `accepted_per_round` is the acceptance length
without the target's own token.
"""

import argparse
import random
from typing import Annotated, Any, Literal

from common import (
    TARGET,
    as_ids,
    decode,
    environment,
    fingerprint,
    heads,
    load,
    options,
    write_json,
)
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Completion, Stats

TOPICS = (
    "a cat", "a city in Europe", "a book about the sea", "a kitchen chair", "a student", "a song",
    "a restaurant", "a football club", "a laptop", "a mountain", "a recipe for soup", "a museum",
    "a bicycle", "a weather report", "a flight", "a bug report", "a tree", "an employee",
)  # fmt: skip
STRICT = ConfigDict(strict=True, extra="forbid")
PLACE = create_model(
    "Place",
    __config__=STRICT,
    city=(str, Field(max_length=16)),
    country=(str, Field(max_length=16)),
)
# Bounded, all of it: an answer that is not done by --max-tokens is merely long.
SCORE = Annotated[int, Field(ge=0, le=100)]
TEXT = Annotated[str, Field(max_length=20)]
FIELDS: dict[str, Any] = {
    "name": (str, Field(max_length=24)),
    "summary": (str, Field(max_length=60)),
    "kind": (Literal["small", "medium", "large"], ...),
    "color": (Literal["red", "green", "blue", "black", "white"], ...),
    "year": (int, Field(ge=1900, le=2030)),
    "rating": (int, Field(ge=1, le=5)),
    "price": (int, Field(ge=0, le=1000)),
    "available": (bool, ...),
    "tags": (list[TEXT], Field(min_length=1, max_length=3)),
    "scores": (list[SCORE], Field(min_length=2, max_length=4)),
    "place": (PLACE, ...),
    "owner": (TEXT | None, ...),
}


def record(seed: int) -> tuple[str, type[BaseModel]]:
    """What is asked, and what the answer must be: two to five fields, in any order."""
    rng = random.Random(seed)
    names = rng.sample(sorted(FIELDS), rng.randint(2, 5))
    model = create_model(f"Record{seed}", __config__=STRICT, **{n: FIELDS[n] for n in names})
    fields = ", ".join(names[:-1]) + " and " + names[-1]
    topic = rng.choice(TOPICS)
    return f"Describe {topic} as a JSON object with {fields}. Answer with the JSON only.", model


def problem(model: type[BaseModel], answer: Completion) -> str | None:
    """Why an answer is not what its schema asks for."""
    if answer.finish_reason == "length":
        return "cut"
    try:
        model.model_validate_json(answer.text)
    except ValidationError:
        return "invalid"
    return None


def row(models: list[type[BaseModel]], answers: list[Completion]) -> dict[str, Any]:
    """What is counted of all answers."""
    problems = [problem(m, a) for m, a in zip(models, answers, strict=True)]
    stats = sum((answer.stats for answer in answers), Stats())
    accepted = sum(stats.accepted)
    return {
        "answers": len(answers),
        "valid": problems.count(None),
        "cut_at_max_tokens": problems.count("cut"),
        "invalid": problems.count("invalid"),
        "output_tokens": sum(len(a.token_ids) for a in answers),
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": accepted,
        "acceptance_rate": round(accepted / stats.drafted, 4),
        "accepted_per_round": round(accepted / stats.rounds, 4),
        "acceptance_length": round(stats.acceptance_length, 4),
        "accepted_per_position": [round(share, 4) for share in stats.accepted_per_position],
    }


def measure(llm: LLM, method: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One head's rows: under the schema, then freely."""
    questions, models = zip(*map(record, range(args.schemas)), strict=True)
    prompts, rows = as_ids(llm, list(questions)), []
    for constrained in (True, False):
        params = [
            SamplingParams(
                max_tokens=args.max_tokens,
                json_schema=model.model_json_schema() if constrained else None,
            )
            for model in models
        ]
        answers = decode(llm, prompts, params, f"{method} {'schema' if constrained else 'free'}")
        kind = {"method": method, "k": args.k, "constrained": constrained}
        rows.append({**kind, **row(list(models), answers)})
        print(rows[-1], flush=True)
    return rows


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The report."""
    folders, llm, rows, shares = heads(args), load(args.dtype, args.batch), [], {}
    for method, folder in folders.items():
        under, free = measure(llm.use(folder, args.k), method, args)
        shares[method] = round(under["accepted_per_round"] / free["accepted_per_round"], 4)
        rows += [under, free]
    settings = {
        "target": TARGET,
        "heads": {method: fingerprint(folder) for method, folder in folders.items()},
        "schemas": args.schemas,
        "max_tokens": args.max_tokens,
        "temperature": 0,
        "dtype": args.dtype,
        "batch": args.batch,
    }
    return {
        "accepted_per_round_constrained_over_free": shares,
        "settings": settings,
        "rows": rows,
        **environment(),
    }


def main() -> None:
    parser = options(__doc__, "grammar.json")
    parser.add_argument("--schemas", type=int, default=100, help="generated schemas")
    parser.add_argument("--k", type=int, default=3, help="draft tokens a round")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32")
    parser.add_argument("--batch", type=int, default=8, help="prompts decoded together")
    args = parser.parse_args()
    write_json(args.output, run(args))


if __name__ == "__main__":
    main()
