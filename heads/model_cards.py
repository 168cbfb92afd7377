"""Write the heads' model cards from what was measured.

    python heads/model_cards.py

Reads benchmarks/results/acceptance.json and each head's config.json.
"""

import json
from pathlib import Path
from string import Template

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "benchmarks" / "results"
CARD = Template((HERE / "card.md.template").read_text())
KINDS = {  # name, how it drafts, peak learning rates, weights by depth
    "p-eagle": (
        "P-EAGLE", "all draft tokens in one forward", "1e-3 and 1.2e-3 (correction 2e-3)",
        "0.8 (later 1.0)",
    ),
    "eagle3": ("EAGLE-3", "one forward a draft token; the baseline", "1.2e-3 and 1.4e-3", "0.8"),
}  # fmt: skip


def table(rows: list[dict], method: str) -> str:
    """Markdown rows of one head's acceptance."""
    lines = [
        "| data set | tokens, at most | K | acceptance length | accepted per position | rounds |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["method"] == method:
            shares = " ".join(f"{share:.3f}" for share in row["accepted_per_position"])
            length = f"{row['acceptance_length']:.3f}"
            lines.append(
                f"| {row['dataset']} | {row['settings']['max_tokens']} | {row['k']} | {length} | "
                f"{shares} | {row['rounds']} |"
            )
    return "\n".join(lines)


def main() -> None:
    """One README.md a head."""
    measured = json.loads((RESULTS / "acceptance.json").read_text())
    for method, (name, how, lr, decay) in KINDS.items():
        folder = HERE / f"smollm2-135m-{method}"
        config = json.loads((folder / "config.json").read_text())
        data = config["peagle"]["provenance"]["data"]
        card = CARD.substitute(
            name=name, how=how, method=method, lr=lr, decay=decay,
            layers=config["num_hidden_layers"],
            depths=config["peagle"]["depths"], vocab=config["draft_vocab_size"],
            window=f"{config['sliding_window']:,}",
            taps=", ".join(map(str, config["eagle_aux_hidden_state_layer_ids"])),
            tokens=f"{data['answer_tokens']:,}", steps=f"{data['steps']:,}",
            device=measured["rows"][0]["device"], table=table(measured["rows"], method),
        )  # fmt: skip
        (folder / "README.md").write_text(card)


if __name__ == "__main__":
    main()
