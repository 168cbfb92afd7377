"""A benchmark: every cell in turn, repeat by repeat, the file written after each."""

import asyncio
import json
import platform
import subprocess
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from peagle.bench.load import Asker, AskError, Conversations, Played, closed_loop, open_loop
from peagle.bench.summary import Cell, Result, row
from peagle.files import replace_file, writing

FORMAT = 1
WARM_UP = [{"role": "user", "content": "Say hello."}]
PACKAGES = ("peagle", "torch", "transformers", "vllm")

Open = Callable[[Cell], AbstractAsyncContextManager[Asker]]
OnDone = Callable[[list[Result], bool], None]  # everything measured so far; whether that is all


class Stopped(RuntimeError):
    """The engine or server stopped answering; what was measured is in the file."""


def run(  # noqa: PLR0913, PLR0917 (what a benchmark is)
    groups: list[list[Result]],
    opened: Open,
    conversations: Conversations,
    repeats: int,
    rate: float | None,
    on_done: OnDone,
) -> None:
    """Play the conversations in every cell, `repeats` times, group by group. The cells of a group
    are interleaved and their order rotates, so that noise of the machine affects all alike.

    Calls `on_done` after each load. Raises Stopped when a load was not answered to its end.
    """
    every = [result for group in groups for result in group]
    for group in groups:
        for repeat in range(repeats):
            turn = repeat * len(group) // repeats
            for result in group[turn:] + group[:turn]:
                if not repeat:
                    asyncio.run(_warm_up(result.cell, opened))
                played = asyncio.run(_play(result.cell, opened, conversations, rate))
                result.repeats.append(played)
                on_done(every, played.whole and all(len(r.repeats) == repeats for r in every))
                if not played.whole:
                    raise Stopped(f"{result.cell}: {played.errors[-1]}")


def alternate(
    results: list[Result],
    opened: Open,
    conversations: Conversations,
    on_done: Callable[[], None] = lambda: None,
) -> None:
    """Play every conversation in each cell in turn, a repeat each; the order rotates from
    conversation to conversation. Calls `on_done` after each conversation.

    Few conversations are compared more fairly so than cell by cell.
    """
    for result in results:
        asyncio.run(_warm_up(result.cell, opened))
    for number, turns in enumerate(conversations):
        turn = number % len(results)
        for result in results[turn:] + results[:turn]:
            result.repeats.append(asyncio.run(_play(result.cell, opened, [turns], None, number)))
        on_done()


async def _warm_up(cell: Cell, opened: Open) -> None:
    async with opened(cell) as asker:
        try:
            await asker.ask(WARM_UP)
        except AskError as error:
            raise Stopped(f"{cell}: {error}") from error


async def _play(
    cell: Cell, opened: Open, conversations: Conversations, rate: float | None, first: int = 0
) -> Played:
    async with opened(cell) as asker:
        if rate is not None:
            return await open_loop(conversations, rate, asker)
        return await closed_loop(conversations, cell.concurrency, asker, first=first)


def report(results: list[Result], about: dict[str, Any], complete: bool) -> dict[str, Any]:
    """The JSON file: `about` (device, versions, settings), then a row for each cell played."""
    played = [result for result in results if result.repeats]
    alone = {_load(result.cell): result for result in played if result.cell.drafting.mode == "none"}
    rows = [row(result, alone.get(_load(result.cell))) for result in played]
    return {"format": FORMAT, "complete": complete, **about, "rows": rows}


def _load(cell: Cell) -> tuple[int, float]:
    return cell.concurrency, cell.temperature


def environment(device: str) -> dict[str, Any]:
    """Device, versions and commit, as the JSON files have them."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"device": device, "versions": versions, "git_commit": _commit()}


def _commit() -> str | None:
    """The commit of this clone, with a + where it was changed; None outside of one."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12"]
    here = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, timeout=10, check=True)
        return done.stdout.decode().strip()
    except (OSError, subprocess.SubprocessError):
        return None


def write_json(file: Path, report: dict[str, Any]) -> None:
    """Replace a file in one step. Raises InputError where it cannot be written."""
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(report, indent=1) + "\n")
