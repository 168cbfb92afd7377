"""Threads of native code wait for each other, and make room where other processes use the cores."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from peagle.backends.cpu import library

SOURCE = Path(__file__).with_name("team.cpp")
MEETINGS, LATE = 10, 2000  # of a team, and microseconds before each


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("team") / "team"
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    command = [*compiler, *library.FLAGS, f"-I{library.SOURCES}", str(SOURCE), "-o", str(made)]
    subprocess.run(command, check=True)
    return made


def run(program: Path, *arguments: int, judged: bool = True) -> tuple[int, int, list[int]]:
    """CPU time in microseconds, meetings at which counts differed, and sizes of teams."""
    command = [str(program), *map(str, [*arguments, int(judged)])]
    done = subprocess.run(command, capture_output=True, check=True)
    spent, wrong, *sizes = map(int, done.stdout.split())
    return spent, wrong, sizes


@pytest.mark.parametrize("threads", [1, 2, 3, 8])  # more than there are cores, too
def test_no_thread_goes_on_before_all_have_come(program: Path, threads: int) -> None:
    _, wrong, sizes = run(program, threads, 5000, 0, 1, 0)
    assert (wrong, sizes) == (0, [threads])


def test_waiting_takes_no_cpu_time(program: Path) -> None:
    """OpenMP's own barriers would spin all that time."""
    spent, wrong, _ = run(program, 2, 10 * MEETINGS, LATE, 1, 0)
    assert wrong == 0
    assert spent < 10 * MEETINGS * LATE / 4


@pytest.mark.parametrize("threads", [2, 4])
def test_a_team_that_waits_much_shrinks_until_it_does_not(program: Path, threads: int) -> None:
    _, wrong, sizes = run(program, threads, MEETINGS, LATE, 10 * threads, 60 * threads)
    assert wrong == 0
    assert sizes[0] == threads and min(sizes) == 1
    grown = sizes[sizes.index(1) :]
    assert max(grown) == threads  # not the last one: other tests may use the cores then


def test_a_team_without_work_for_all_stays_as_it_is(program: Path) -> None:
    """Attention of one row has a task a key head: other threads sleep, and none is in the way."""
    _, wrong, sizes = run(program, 4, MEETINGS, LATE, 40, 0, judged=False)
    assert (wrong, set(sizes)) == (0, {4})
