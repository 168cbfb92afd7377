"""`peagle generate --show-tree`: the tree of every round, and an answer that is the same."""

import re
from pathlib import Path

import pytest
from runner import invoke, printed

from peagle.cli.generate import ALONE, LEGEND, _write
from peagle.engine.tree import Draft

ASK = ("the cat sat", "--max-tokens", 40, "--dtype", "float32")
ROUND = re.compile(
    r"(?:prompt|round (\d+)): (?:no draft|(\d+) drafted, (\d+) accepted)(, then \".*\")?"
)
NODE = re.compile(r"([✓·]) ((?:  )*)\"(.*)\"  (\d\.\d\d)  (head|lookup)")


def test_nodes_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows: 1 and 4 after the newest token, 2 and 3 after row 1."""
    draft = Draft()
    for parent, token, prob, chance in [
        (0, 10, 0.8, 0.8),
        (1, 11, 0.5, 0.4),
        (1, 12, 0.0, 0.2),
        (0, 13, 0.1, 0.1),
    ]:
        draft.add(parent, token, prob, chance)
    _write("round 1", draft, [10, 12, 99], str)
    assert capsys.readouterr().err.splitlines() == [
        "round 1: 4 drafted, 2 accepted, then [99]",
        "✓ [10]  0.80  head",
        "·   [11]  0.40  head",
        "✓   [12]  0.20  lookup",
        "· [13]  0.10  head",
    ]
    _write("round 2", draft, [99, 10], str)
    assert "✓" not in capsys.readouterr().err
    _write("prompt", Draft(), [10], str)
    assert capsys.readouterr().err == "prompt: no draft, then [10]\n"


@pytest.mark.parametrize("kind", ["tree", "chain", "lookup"])
def test_every_round_is_shown(target: Path, heads: dict[str, Path], kind: str) -> None:
    head = ("--head", heads["p-eagle"])
    drafting = {
        "tree": (*head, "--nodes", 6),
        "chain": (*head, "--k", 3),
        "lookup": ("--method", "lookup", "--nodes", 6),
    }[kind]
    plain = printed("generate", target, *ASK, *drafting)
    shown = invoke("generate", target, *ASK, *drafting, "--show-tree")
    assert shown.stdout.startswith(plain["text"] + "\n"), "the answer, after all trees"
    legend, first, *lines = shown.stderr[shown.stderr.index(LEGEND) :].splitlines()
    assert legend == LEGEND and first.startswith("prompt: no draft, then ")
    rounds, deepest = list[re.Match[str]](), 0
    below, marks = 0, 0
    for line in lines:
        if found := ROUND.fullmatch(line):
            assert below == 0, "as many nodes as are told"
            rounds.append(found)
            below, marks = int(found[2] or 0), int(found[3] or 0)
        else:
            node = NODE.fullmatch(line)
            assert node is not None, line
            below -= 1
            deepest = max(deepest, len(node[2]) // 2)
            marks -= node[1] == "✓"
            assert below or not marks, "as many accepted as are told"
            assert (node[5] == "lookup") >= (kind == "lookup")
    assert [int(found[1]) for found in rounds] == list(range(1, len(rounds) + 1))
    with_drafts = [found for found in rounds if found[2]]
    assert len(with_drafts) == plain["rounds"]
    drafted = sum(int(found[2]) for found in with_drafts)
    assert drafted == pytest.approx(plain["nodes"] * plain["rounds"] if drafted else 0, abs=0.3)
    if kind == "chain":
        assert deepest == 2
    if kind != "lookup":
        assert any(int(found[3]) for found in with_drafts)


def test_without_drafts_it_says_so(target: Path) -> None:
    shown = invoke("generate", target, *ASK, "--no-speculation", "--show-tree")
    assert shown.stderr.count(ALONE) == 1 and "round" not in shown.stderr
