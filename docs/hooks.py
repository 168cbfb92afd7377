"""Pages of the site that are made when it is built, so that they cannot go stale."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.core import TyperCommand, TyperGroup

from peagle.cli.main import COMMANDS, load_command

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
INTRODUCTION = """# Command line

Every command with its arguments and options, as `--help` says them. Exit codes: 0 is done, 2 is
bad input (one line says what and how to mend it), 130 is stopped by Ctrl-C, 1 is any other failure,
or a check that failed.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is not a file under docs/."""
    page = "".join([INTRODUCTION, *commands()])
    files.append(File.generated(config, "reference/cli.md", content=page))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put in what a page asks for: the README's beginning, or what the shipped heads reached."""
    begun = markdown.replace("<!-- introduction -->", introduction())
    return begun.replace("<!-- heads -->", heads())


def introduction() -> str:
    """The README's introduction and its installation, with the pictures' paths from docs/."""
    text = (ROOT / "README.md").read_text()
    begun = text[text.index("\n") : text.index("## Serve")]
    return begun.replace("docs/", "")


def heads() -> str:
    """Answer tokens and acceptance length of the shipped heads, as they are recorded."""
    rows = json.loads((RESULTS / "acceptance.json").read_text())["rows"]
    columns = sorted({(row["dataset"], row["k"]) for row in rows})
    names = " | ".join(f"{dataset}, K = {k}" for dataset, k in columns)
    lines = [f"| head | answer tokens | {names} |", "|---|---|" + "---|" * len(columns)]
    for method in ("p-eagle", "eagle3"):
        config = ROOT / "heads" / f"smollm2-135m-{method}" / "config.json"
        data = json.loads(config.read_text())["peagle"]["provenance"]["data"]
        found = {(r["dataset"], r["k"]): r for r in rows if r["method"] == method}
        lengths = " | ".join(f"{found[column]['acceptance_length']:.2f}" for column in columns)
        lines.append(f"| {method} | {data['answer_tokens']:,} | {lengths} |")
    return "\n".join(lines)


def commands() -> Iterator[str]:
    """A section for every command that can be run."""
    for name in COMMANDS:
        found = load_command(name)
        parts = found.commands if isinstance(found, TyperGroup) else {}
        if not isinstance(found, TyperGroup) or found.invoke_without_command:
            yield section(f"peagle {name}", found)
        for part, command in parts.items():
            yield section(f"peagle {name} {part}", command)


def section(name: str, command: TyperCommand | TyperGroup) -> str:
    """Heading, how it is called, what it does, and its options."""
    context = typer.Context(command, info_name=name)
    usage = command.get_usage(context).removeprefix("Usage:").strip()
    page = [f"\n## {name}\n", f"```text\n{' '.join(usage.split())}\n```\n", f"{command.help}\n"]
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is None or "completion" in str(parameter.name):
            continue
        names, text = record
        page.append(f"`{names}`\n:   {plain(text) or '…'}\n")
    return "\n".join(page)


def plain(text: str) -> str:
    """Help as Markdown that says just that."""
    return " ".join(text.split()).replace("<", "&lt;").replace("*", r"\*").replace("[", r"\[")
