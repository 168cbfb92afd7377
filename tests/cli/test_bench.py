"""`peagle bench`: the file, the page and the pictures; comparisons; what is refused."""

import json
import shutil
import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from json_files import read_json, write_lines
from runner import Refused, invoke

from peagle.bench import report as pages
from peagle.bench import run
from peagle.bench.summary import doubt
from peagle.cli.bench import COLUMNS
from peagle.cli.measure import print_rows

ROW = {  # every row has these
    "method", "k", "head", "concurrency", "temperature", "repeats", "requests", "output_tokens",
    "seconds", "output_tps", "output_tps_95", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50",
    "tpot_ms_p99", "acceptance_length", "accepted_per_position", "errors", "error", "max_nodes",
    "lookup", "nodes", "rows_per_round", "tokens_per_forward", "accepted_from_lookup",
}  # fmt: skip


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "questions.jsonl"
    turns = [["the cat", "and then"], ["what a day! what a day!"], ["the mat"]]
    return write_lines(file, *({"turns": turn} for turn in turns))


@pytest.fixture(scope="module")
def measured(
    target: Path, heads: dict[str, Path], questions: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    output = tmp_path_factory.mktemp("measured") / "deep" / "bench.json"
    named = [part for method, head in heads.items() for part in (f"--{method}", head)]
    load = ("--k", "2,adaptive", "--concurrency", "1,2", "--temperature", "0,0.8")
    sizes = ("--max-tokens", 16, "--repeats", 2, "--dataset", questions)
    said = invoke("bench", target, *named, *load, *sizes, "--output", output)
    assert str(output) in said.stdout.replace("\n", "")
    return output


def test_the_file(measured: Path, target: Path) -> None:
    report = read_json(measured)
    assert report["complete"] and report["device"] and report["versions"]["torch"]
    assert report["settings"]["target"] == target.name
    assert report["settings"]["conversations"] == 3
    rows = report["rows"]
    assert all(row.keys() >= ROW for row in rows)
    keys = [(row["method"], row["k"], row["concurrency"], row["temperature"]) for row in rows]
    assert len(set(keys)) == len(keys) == 2 * 2 * 5
    assert all(row["requests"] == 8 and not row["errors"] for row in rows), "four turns, twice"
    for row in rows:
        drafts = row["method"] != "none"
        assert (row["acceptance_length"] is not None) <= drafts
        assert row["ttft_ms_p50"] <= row["ttft_ms_p99"]
        if row["k"] == 2:
            assert len(row["accepted_per_position"]) == 2 and row["speed_up"] > 0
        if drafts and not row["temperature"]:
            assert row["same"] == row["compared"] == 8, "float32, and no ties here"
        if drafts and row["temperature"]:
            assert "same" not in row


def test_settings(target: Path, heads: dict[str, Path], questions: Path, tmp_path: Path) -> None:
    """Chain, tree and the budget are told apart, in file and tables."""
    output = tmp_path / "bench.json"
    named = [part for method, head in heads.items() for part in (f"--{method}", head)]
    asked = ("--methods", "none,p-eagle,eagle3,lookup")
    sizes = ("--k", "3,adaptive", "--nodes", 8)
    load = ("--max-tokens", 24, "--repeats", 1, "--dataset", questions, "--output", output)
    said = invoke("bench", target, *named, *asked, *sizes, *load).stdout
    rows = read_json(output)["rows"]
    tree = (None, 8, True)
    drafting = [(3, None, False), ("adaptive", None, True), tree]
    settings = {row["method"]: [] for row in rows}
    for row in rows:
        settings[row["method"]].append((row["k"], row["max_nodes"], row["lookup"]))
    heads_drafting = dict.fromkeys(("p-eagle", "eagle3"), drafting)
    assert settings == {"none": [(0, None, False)], **heads_drafting, "lookup": [tree]}
    [plain] = [row for row in rows if row["method"] == "none"]
    figures = ("nodes", "rows_per_round", "tokens_per_forward", "accepted_from_lookup")
    assert [plain[figure] for figure in figures] == [None, 1, 1, 0]
    for row in rows:
        accepted = sum(row["accepted_per_position"])
        assert row["accepted_from_lookup"] == 0 or row["lookup"]
        assert row["tokens_per_forward"] <= (row["acceptance_length"] or 1) + 0.01
        if row["k"] == 3:
            assert row["nodes"] == 3 and row["rows_per_round"] == 4
        if row["max_nodes"] and row["method"] == "p-eagle":
            assert 4 < row["nodes"] <= 8 and row["tokens_per_forward"] > 1
        if row["method"] == "lookup" and accepted:
            assert row["accepted_from_lookup"] > 0
    for words in ("K = 3", "8 nodes + lookup", "adaptive + lookup"):
        assert words in said
    assert "8 nodes + lookup" in output.with_suffix(".html").read_text()
    again = invoke("bench", "compare", output, output).stdout
    assert again.count("alike") == len(rows) and "8 nodes + lookup" in again


def test_page(measured: Path) -> None:
    page = measured.with_suffix(".html").read_text()
    assert page.count("<svg") == 1 and "P-EAGLE" in page
    assert "http://" not in page.replace("http://www.w3.org", "").replace(
        "http://purl.org", ""
    ).replace("http://creativecommons.org", "")  # noqa: E501
    assert "<script" not in page and 'src="' not in page


def test_a_speed_up_that_cannot_be_is_left_out(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the table and on the page; a line says why."""
    report = read_json(measured)
    row = report["rows"][-1] | {"speed_up": 98.76, "speed_up_95": [97.65, 99.87]}
    report["rows"] = [row]
    print_rows([row], *COLUMNS)
    shown = capsys.readouterr()
    page = pages.write(report, tmp_path / "busy.json").read_text()
    why = doubt(row)
    assert why is not None and why in shown.err and why in page
    assert "97.65" not in shown.out + page and shown.out.count("98.76") == 0
    assert page.count("98.76") == page.count(why) == 1


def changed(measured: Path, output: Path, change: Any) -> Path:
    report = read_json(measured)
    change(report)
    output.write_text(json.dumps(report))
    return output


def test_slower_is_a_failure(measured: Path, tmp_path: Path) -> None:
    def slow(report: dict[str, Any]) -> None:
        for row in report["rows"]:
            row["output_tps"] /= 10
            row["output_tps_95"] = [edge / 10 for edge in row["output_tps_95"]]

    assert invoke("bench", "compare", measured, measured).stdout.count("alike") == 20
    slower = changed(measured, tmp_path / "slow.json", slow)
    assert "slower" in invoke("bench", "compare", measured, slower, code=1).stdout
    assert "faster" in invoke("bench", "compare", slower, measured).stdout


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda r: r.update(device="another"), None),
        (lambda r: r["settings"].update(max_tokens=99), None),
        (lambda r: r.update(rows=[]), None),
        (lambda r: r["rows"][0].update(errors=1, error="the queue is full"), None),
        (lambda r: r.update(format=0), "after"),
        (lambda r: r.pop("rows"), "after"),
    ],
)
def test_not_comparable(
    measured: Path, tmp_path: Path, refused: Refused, change: Any, field: str | None
) -> None:
    other = changed(measured, tmp_path / "other.json", change)
    refused("bench", "compare", measured, other, field=field)


def test_another_chat_template_is_not_comparable(
    measured: Path, target: Path, questions: Path, tmp_path: Path, refused: Refused
) -> None:
    output = tmp_path / "bench.json"
    how = ("--methods", "none", "--dataset", questions, "--max-tokens", 2, "--repeats", 1)
    invoke("bench", target, *how, "--output", output, "--chat-template", "plain")
    line = refused("bench", "compare", measured, output)
    assert "not comparable: chat_template None" in line


@pytest.mark.parametrize(("folder", "known"), [(".", True), (".venv/site-packages", False)])
def test_the_commit_is_that_of_a_clone(tmp_path: Path, folder: str, known: bool) -> None:
    """It is not that of a repository in which the package is installed."""
    git = ("git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "one")):
        subprocess.run([*git, *command], check=True)
    copied = tmp_path / folder / "peagle" / "bench" / "run.py"
    copied.parent.mkdir(parents=True)
    shutil.copy(str(run.__file__), copied)
    spec = spec_from_file_location("copied", copied)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (module.environment("here")["git_commit"] is not None) == known


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (("--methods", "eagle4"), "methods"),
        (("--k", "0"), "k"),
        (("--nodes", "0"), "nodes"),
        (("--nodes", "many"), "nodes"),
        (("--nodes", "8", "--no-lookup"), "nodes"),
        (("--nodes", "8,300"), "nodes"),
        (("--concurrency", "0"), "concurrency"),
        (("--concurrency", "1,9", "--limit", "8"), "concurrency"),
        (("--temperature", "-1"), "temperature"),
        (("--temperature", "0,200"), "temperature"),
        (("--temperature", "0,nan"), "temperature"),
        (("--temperature", "warm"), "temperature"),
        (("--repeats", "0"), "repeats"),
        (("--max-tokens", "0"), "max_tokens"),
        (("--dataset", "nowhere"), "dataset"),
        (("--output", "results/bench.html"), "output"),
        (("--methods", "eagle3"), "eagle3"),
        (("--methods", "p-eagle"), "p_eagle"),
    ],
)
def test_bad_options(refused: Refused, target: Path, args: tuple[str, ...], field: str) -> None:
    refused("bench", target, *args, field=field)
