"""The documentation: it builds without warnings and loads nothing from other hosts. Its pictures
are up to date, and its commands, imports and file names exist."""

import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import groupby
from pathlib import Path

import pytest
from refusals import TEXTS, VARIABLE
from typer.core import TyperCommand, TyperGroup

import peagle
from peagle.bench.workload import read_workload
from peagle.cli.main import COMMANDS, load_command

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`(peagle\s[^`]+)`")


def shown(text: str) -> list[list[str]]:
    """Arguments of every `peagle` command in the shell blocks of a page."""
    blocks = [block for language, block in FENCE.findall(text) if language == "sh"]
    return [words for block in blocks for words in calls(block)]


def calls(block: str) -> Iterator[list[str]]:
    """Arguments of every `peagle` command in a shell block."""
    block = re.sub(r"(?:^|(?<=\s))#.*", "", block.replace("\\\n", " "), flags=re.MULTILINE)
    lexer = shlex.shlex(block, posix=True, punctuation_chars=";&|<>\n")
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t", "", True
    for ends, words in groupby(lexer, key=lambda word: set(word) <= set(";&|<>\n")):
        line = list(words)
        if not ends and "peagle" in line:
            arguments = line[line.index("peagle") + 1 :]
            and_more = arguments[-1:] == ["..."] and not arguments[-2].startswith("-")
            yield arguments[:-1] if and_more else arguments


def command_of(words: list[str]) -> tuple[TyperCommand | TyperGroup, list[str]]:
    """The command that words call, and the words after its name."""
    if words[0] not in COMMANDS:
        raise ValueError(f"there is no command {words[0]}")
    command, rest = load_command(words[0]), words[1:]
    while isinstance(command, TyperGroup):
        if not rest and not command.invoke_without_command:
            return command, rest
        context = command.make_context(words[0], list(rest))
        left = [*context._protected_args, *context.args]
        if not left:
            return command, rest
        _, found, rest = command.resolve_command(context, left)
        assert found is not None
        command = found
    return command, rest


def check_call(words: list[str]) -> None:
    """Parse a command as the command line does, without running it."""
    command, rest = command_of(words)
    if not isinstance(command, TyperGroup):
        command.make_context(words[0], list(rest))


def check_span(words: list[str]) -> None:
    """Check the name and the options of a command in a sentence; arguments may be missing."""
    if words[0].startswith("-"):
        return
    command, rest = command_of([word for word in words if word != "…"])
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    for word in rest:
        if word.startswith("--") and word not in known:
            raise ValueError(f"no such option: {word}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_is_shown_can_be_called(page: Path) -> None:
    text = page.read_text()
    wrong = []
    spans = [shlex.split(span)[1:] for span in SPAN.findall(FENCE.sub("", text))]
    for check, commands in ((check_call, shown(text)), (check_span, spans)):
        for words in commands:
            try:
                check(words)
            except Exception as error:  # of the parser: its classes are typer's own affair
                wrong.append(f"peagle {shlex.join(words)}: {error}")
    assert not wrong, "\n".join(wrong)


def test_commands_are_found_in_blocks() -> None:
    block = "OMP=1 peagle train a --steps 2 \\\n  --data b  # how\ncurl x | peagle catalog && ls\n"
    assert list(calls(block)) == [["train", "a", "--steps", "2", "--data", "b"], ["catalog"]]
    assert len(shown((ROOT / "README.md").read_text())) >= 6
    assert len(shown((ROOT / "docs" / "training.md").read_text())) > 15


@pytest.mark.parametrize(
    "call", ["train a --stpes 2", "train a --steps two", "generate a", "data shwo a", "trian a"]
)
def test_a_wrong_command_is_caught(call: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|a valid|missing|no command"):
        check_call(call.split())


def test_a_wrong_option_in_a_sentence_is_caught() -> None:
    check_span(["train", "--resume"])
    with pytest.raises(ValueError, match="no such option: --rseume"):
        check_span(["train", "--rseume"])


def in_fields(error: str) -> str:
    """An error with fields in place of flags, as the core names them."""
    named = re.sub(r"--([a-z][\w-]*)", lambda flag: flag[1].replace("-", "_"), error)
    return named.removeprefix("peagle: ").replace("`", "")


def quoted_as(line: str) -> re.Pattern[str]:
    """The errors of which a page shows one: … and a word in capitals stand for anything."""
    for pattern, placeholder in VARIABLE.items():
        line = re.sub(pattern, placeholder, re.sub(r"\bH\b", "/H", line))
    return re.compile(re.sub(r"…|\b[A-Z]+\b", ".+", re.escape(in_fields(line))))


def test_every_error_that_is_quoted_is_one() -> None:
    """Errors that tests provoke are quoted; H stands for the folder of a head."""
    blocks = [block for page in PAGES for kind, block in FENCE.findall(page.read_text())
              if kind == "text"]  # fmt: skip
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("peagle:")]
    assert len(lines) > 20
    errors = list(map(in_fields, TEXTS.read_text().splitlines()))
    assert [line for line in lines if not any(map(quoted_as(line).fullmatch, errors))] == []


def test_an_error_that_is_none_is_found() -> None:
    shown = "peagle: --k …: must be at least …"
    assert quoted_as(shown).fullmatch(in_fields("k 0: must be at least 1"))
    assert not quoted_as(shown).fullmatch(in_fields("peagle: --k 0: must be above 1"))
    assert quoted_as("peagle: --head H: no config.json; did you mean H/head?").fullmatch(
        in_fields("peagle: --head <path>: no config.json; did you mean <path>")
    )


IMPORT = re.compile(r"from (peagle[\w.]*) import ([\w, ]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_name_that_is_imported_is_there(page: Path) -> None:
    for module, names in IMPORT.findall(page.read_text()):
        for name in names.split(","):
            assert hasattr(import_module(module), name.strip()), f"{module}.{name.strip()}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_is_named_is_there(page: Path) -> None:
    names = re.findall(r"`([\w/.-]+/[\w.-]+\.(?:py|h|sh|yaml|Dockerfile))`", page.read_text())
    for name in names:
        placeholder = name.endswith(("/mine.py", "/test_mine.py", "/NAME.py"))
        assert placeholder or (ROOT / name).exists() or (ROOT / "peagle" / name).exists(), name


def test_every_public_name_is_there() -> None:
    for name in peagle.__all__:
        assert hasattr(peagle, name), name


@pytest.mark.slow
def test_it_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    from mkdocs.commands.build import build  # noqa: PLC0415 (neither are other tests' affair)
    from mkdocs.config import load_config  # noqa: PLC0415

    site = tmp_path / "site"
    config = load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(site))
    build(config)  # raises at a warning: a link, an anchor, a page that nothing leads to
    pages = list(site.rglob("*.html"))
    assert len(pages) > 10
    loads = re.compile(r"<(?:script|img|iframe|link)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>")
    assert [found for page in pages for found in loads.findall(page.read_text())] == []
    for style in site.rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?(?:https?:)?//", style.read_text()), style


def test_pictures_are_what_the_code_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    for script in ("figures.py", "memory_chart.py", "round_figures.py", "speedup_chart.py"):
        monkeypatch.setattr(sys, "argv", [script, "--output", str(tmp_path)])
        runpy.run_path(str(ROOT / "docs" / script), run_name="__main__")
    drawn = {file.name: file.read_text() for file in tmp_path.iterdir()}
    kept = {file.name: file.read_text() for file in (ROOT / "docs" / "figures").glob("*.svg")}
    assert drawn == kept, "draw them again: python docs/SCRIPT.py"


def test_recordings_are_small() -> None:
    recordings = list((ROOT / "docs" / "figures").glob("*.webp"))
    assert len(recordings) == 2 and all(f.stat().st_size <= 1_500_000 for f in recordings)


def test_the_readmes_speed_ups_were_measured() -> None:
    """The README's speed-ups of default drafting are those of benchmarks/trees.py."""
    parts = json.loads((ROOT / "benchmarks" / "results" / "trees.json").read_text())["parts"]
    text = (ROOT / "README.md").read_text()
    ways = {
        "P-EAGLE and lookup": "P-EAGLE",
        "EAGLE-3 and lookup": "EAGLE-3 + lookup",
        "lookup, without a head": "lookup",
    }
    for name, way in ways.items():
        cells = []
        for part in ("humaneval", "mt-bench", "edits"):
            speeds = {row["way"]: row["output_tps"] for row in parts[part]}
            cells.append(f"{speeds[way] / speeds['alone']:.1f} ×")
        assert f"| {name} | {' | '.join(cells)} |" in text
    rows = json.loads((ROOT / "benchmarks" / "results" / "engines.json").read_text())["rows"]
    ours, theirs = (
        {
            (row["method"], row["k"]): row["ratio"]  # to ours alone
            for row in rows
            if (row["engine"], row["weights"], row["concurrency"]) == (engine, "bf16", 1)
        }
        for engine in ("peagle", "vllm")
    )
    alone, chain, default = ("none", 0), ("p-eagle", 5), ("p-eagle", "adaptive")
    said = re.search(r"runs ([\d.]+) × .*it is ([\d.]+) ×, .*drafts ([\d.]+) ×", text)
    assert said is not None
    pairs = ((alone, alone), (chain, chain), (default, chain))
    for found, (mine, other) in zip(said.groups(), pairs, strict=True):
        assert abs(float(found) - ours[mine] / theirs[other]) < 0.055


@pytest.mark.parametrize(("end", "which"), [("_avx2", 0), ("_amx", 1)])
def test_the_readmes_speeds_beside_vllm_were_measured(end: str, which: int) -> None:
    """The README's ranges over three targets, by the number of requests."""
    found = re.findall(
        r"run ([\d.]+) to ([\d.]+) times as fast [^.]*, and ([\d.]+) to ([\d.]+) times with 8",
        (ROOT / "README.md").read_text(),
    )
    assert len(found) == 2
    measured = list[float]()
    for load in (1, 8):
        speeds = []
        for target in ("", "_qwen", "_gemma"):
            file = ROOT / "benchmarks" / "results" / f"engines{target}{end}.json"
            [ratio] = [
                row["ratio"]  # to ours alone
                for row in json.loads(file.read_text())["rows"]
                if (row["engine"], row["method"], row["concurrency"]) == ("vllm", "none", load)
            ]
            speeds.append(1 / ratio)
        measured += [min(speeds), max(speeds)]
    assert list(map(float, found[which])) == pytest.approx(measured, abs=0.055)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_links_lead_somewhere(page: Path) -> None:
    """Files that exist, and addresses of a sound form; mkdocs checks headings."""
    text = FENCE.sub("", page.read_text())
    links = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", text)
    for link in [first or second for first, second in links]:
        address = re.fullmatch(r"https://[a-z0-9.-]+\.[a-z]+/[\w./~#-]*", link)
        file = page.parent / link.partition("#")[0]
        generated = file.name == "cli.md"
        assert address or link.startswith("#") or file.is_file() or generated, link


def sentences(text: str) -> Iterator[str]:
    """Sentences of a page; a cell of a table and an item of a list are units of their own."""
    text = re.sub(r"```.*?```|<!-- tables.*?end of tables -->|<[^>]+>", "", text, flags=re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)|\]\([^)]*\)", "", text)
    text = re.sub(r"`[^`]*`|\b(?:vLLM|peagle|torch|cuDNN)\b", "Name", text)
    for part in re.split(r"\n\s*\n|\||\n(?=\s*(?:[-*#>:]|\d+\.) )", text):
        yield from re.split(r"(?<=[.!?])[\"”)*]*\s+(?=[\"“(*\[]*[A-Z0-9])", " ".join(part.split()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_sentences_have_at_most_30_words(page: Path) -> None:
    if page.name != "ARCHITECTURE.md":
        long = [each for each in sentences(page.read_text()) if len(each.split()) > 30]
        assert long == []


def test_the_tutorials_figures_were_measured() -> None:
    found = json.loads((ROOT / "docs" / "figures" / "tutorial.json").read_text())
    text = (ROOT / "docs" / "tutorial.md").read_text()
    for step, length in found["acceptance_length"].items():
        assert f"step {step}: acceptance length {length:.2f} over {found['held_out']} doc" in text
    middle, low, high = found["questions"]["speed_up_k3"]
    assert f"worth it: {middle:.2f} × ({low:.2f}–{high:.2f}) the target alone at K = 3" in text
    assert f"({found['answer_tokens']} answer tokens)" in text


def test_the_readmes_installation_fits_the_clone() -> None:
    """An environment comes before pip, and torch and its index are those of the other files."""
    text = (ROOT / "README.md").read_text()
    [block] = [b for kind, b in FENCE.findall(text) if kind == "sh" and "pip install" in b]
    constraints = (ROOT / "constraints.txt").read_text()
    [torch] = re.findall(r"^torch==\S+$", constraints, re.MULTILINE)
    places = [block.index(each) for each in ("-m venv", "make wheel", f"pip install {torch} ")]
    assert places == sorted(places)
    [index] = set(re.findall(r"https://download[\w./]+", text))
    assert f"--index-url {index}\n" in block and f"PIP_EXTRA_INDEX_URL={index} make demo" in text
    for file in (".github/workflows/tests.yml", "docker/cpu.Dockerfile", "CONTRIBUTING.md"):
        assert index in (ROOT / file).read_text(), file


def test_the_readmes_line_of_prompts_is_read(tmp_path: Path) -> None:
    [record] = re.findall(r'`(\{"turns".*?\})`', (ROOT / "README.md").read_text())
    file = tmp_path / "questions.jsonl"
    file.write_text(f"{record}\n")
    assert read_workload(str(file)).conversations == [["a question"]]


def test_ties_of_any_target_can_be_told_from_bugs() -> None:
    """By the two commands of the page: benchmarks/lossless.py knows the demo target only."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    section = page.split("\n## The output differs")[1].split("\n## ")[0]
    both = shown(section)
    assert len(both) == 2 and all({"--json", "--logprobs"} <= {*words} for words in both)
    assert "lossless.py" not in section


def test_the_tutorial_serves_its_own_files_by_vllm() -> None:
    steps = shown((ROOT / "docs" / "tutorial.md").read_text())
    [words] = [words for words in steps if "--vllm-python" in words]
    assert words[:4] == ["serve", "coder.gguf", "--head", "runs/mine/best"]


def test_skypilot_is_started_where_its_workdir_is_the_clone() -> None:
    """A relative workdir begins at the folder of the command."""
    text = (ROOT / "docs" / "jobs" / "skypilot.yaml").read_text()
    [file] = re.findall(r"from the root of a clone: sky jobs launch (\S+)", text)
    assert (ROOT / file).read_text() == text and "\nworkdir: .\n" in text


def test_speeds_on_other_cpus_are_of_the_present_heads() -> None:
    results = ROOT / "benchmarks" / "results"
    rows = json.loads((results / "acceptance.json").read_text())["rows"]
    present = {row["method"]: row["settings"]["head"] for row in rows}
    files = [*results.glob("*_avx2.json"), *results.glob("*_amx.json")]
    assert len(files) > 3
    for file in files:
        heads = json.loads(file.read_text())["settings"].get("heads", {})
        assert heads.items() <= present.items(), file.name
    page = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    assert "except those without AVX-512 and with AMX: those are of the present heads" in page


def test_the_readme_has_the_speed_ups_without_avx512() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "trees_avx2.json").read_text())
    measured = []
    for way in ("P-EAGLE", "EAGLE-3 + lookup"):
        for part in ("humaneval", "mt-bench"):
            [row] = [each for each in results["parts"][part] if each["way"] == way]
            measured.append(f"{row['speed_up']:.2f} ×")
    text = "P-EAGLE makes HumanEval {} and MT-Bench {} as fast, EAGLE-3 {} and {}."
    assert text.format(*measured) in (ROOT / "README.md").read_text()


def test_the_readme_has_the_speed_ups_with_amx() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "trees_amx.json").read_text())
    ways = {row["way"]: f"{row['speed_up']:.2f} ×" for row in results["parts"]["humaneval"]}
    text = (
        "P-EAGLE with lookup makes HumanEval {P-EAGLE} as fast on it, EAGLE-3 {EAGLE-3 + lookup}."
    )
    assert text.format(**ways) in (ROOT / "README.md").read_text()


def test_machines_without_avx512_have_the_name_of_those_with_it() -> None:
    results = ROOT / "benchmarks" / "results"
    for file in results.glob("engines*_avx2.json"):
        other = file.with_name(file.name.replace("_avx2", ""))
        names = {json.loads(each.read_text())["device"] for each in (file, other)}
        assert len(names) == 1, file.name
    assert "whose virtual CPU hides AVX-512" in (ROOT / "docs" / "benchmarks.md").read_text()


def test_the_tables_are_what_the_script_writes() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))
    benchmarks = (ROOT / "docs" / "benchmarks.md").read_text()
    pages = {
        "README.md": script["heads"](),
        "docs/benchmarks.md": script["lines_of"](script["SHIPPED"]),
        "docs/training.md": script["lines_of"](script["TRAINING"]),
    }
    for page, lines in pages.items():
        assert "\n".join(lines) in (ROOT / page).read_text(), "python benchmarks/tables.py"
    assert "\n".join(script["lines_of"](script["BENCHMARKS"])) in benchmarks
