"""Nothing leaves the sandbox of `--pass-at-1`, for root and for an ordinary user, and every attack
does get out where there is no sandbox."""

import errno
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from escapes import (
    ESCAPES,
    INSIDE_ONLY,
    NEEDS_KERNEL,
    NEEDS_ROOT,
    got_out,
    works_outside,
)

from peagle.bench import sandbox
from peagle.bench.seccomp import allowed_numbers
from peagle.errors import InputError

try:
    sandbox.check()
    WHY = ""
except InputError as error:
    WHY = str(error)
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY)
USER = 65534  # nobody
# uretprobe and uprobe: Linux shows them to no filter, and they kill a process that calls them.
PROBES = {"x86_64": (335, 336)}

# Calls each number with arguments that mean nothing, and prints the ones that the kernel looked at.
CALLS = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for number in {numbers}:
    ctypes.set_errno(0)
    wrong = [ctypes.c_long(-1)] * 6
    assert libc.syscall(ctypes.c_long(number), *wrong) == -1, number
    assert ctypes.get_errno() == 1, (number, ctypes.get_errno())
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 1)


@pytest.fixture(scope="module")
def tried(request: pytest.FixtureRequest) -> Iterator[list[bool]]:
    """Whether each escape succeeded; their count is printed at the end, of each worker's share."""
    found: list[bool] = []
    yield found
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        report = f"\nescapes from the sandbox: {len(found)} tried, {sum(found)} got out"
        print(report, file=sys.stderr)  # where workers of xdist can be heard


@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_gets_out(name: str, tried: list[bool]) -> None:
    tried.append(got_out(name))
    assert not tried[-1]


@pytest.mark.parametrize("name", [name for name in ESCAPES if name not in INSIDE_ONLY])
def test_it_gets_out_where_there_is_no_sandbox(name: str) -> None:
    if not works_outside(name):
        if name in NEEDS_KERNEL or (name in NEEDS_ROOT and os.getuid() != 0):
            pytest.skip("this host refuses it without a sandbox")
        pytest.fail("the attack does nothing, so it proves nothing")


def test_nothing_gets_out_for_an_ordinary_user(tried: list[bool]) -> None:
    if os.getuid() != 0:
        pytest.skip("the other tests were run by an ordinary user")
    interpreter = next(filter(runs_for_others, (sys.executable, "/usr/bin/python3")), None)
    if interpreter is None:
        pytest.skip("an ordinary user may not read this interpreter, and has no /usr/bin/python3")
    script = Path(__file__).with_name("escapes.py")
    done = subprocess.run(
        [sys.executable, script, str(USER), interpreter],
        stdout=subprocess.PIPE, check=True, timeout=300,
    )  # fmt: skip
    out = json.loads(done.stdout)
    tried.extend(name in out for name in ESCAPES)
    assert out == []


def runs_for_others(interpreter: str) -> bool:
    """Whether an ordinary user can start an interpreter."""
    try:
        command = [interpreter, "-I", "-S", "-c", ""]
        return subprocess.run(command, user=USER, group=USER, check=False).returncode == 0
    except OSError:
        return False


def test_every_system_call_that_is_not_allowed_is_refused() -> None:
    """With EPERM, before the kernel looks at it: other errors would come of these arguments."""
    allowed = allowed_numbers(platform.machine())
    left_out = {*allowed, *PROBES.get(platform.machine(), ())}
    numbers = [number for number in range(700) if number not in left_out]
    if platform.machine() == "x86_64":
        numbers += [0x40000000 + number for number in range(700)]  # x32
    assert sandbox.passes(CALLS.format(numbers=numbers))
    assert not sandbox.passes(CALLS.format(numbers=allowed[:1]))  # the program can tell them apart


def test_there_is_nothing_but_the_interpreter_and_nothing_can_be_written() -> None:
    command = sandbox.enclosure(sys.executable)
    bound = tuple(command[at + 2] for at, word in enumerate(command) if word == "--ro-bind")
    # An ordinary user's rights, a link to nowhere, and the interpreter, which is running.
    refused = (errno.EROFS, errno.EACCES, errno.ENOENT, errno.ETXTBSY)
    program = f"""
import os
read_only = 0
for folder, _, files in os.walk("/"):
    paths = [os.path.join(folder, file) for file in files]
    for path in paths:
        assert path.startswith({bound}) and "site-packages" not in path, path
    for path, mode in [(folder + "/new", "w"), *((path, "r+") for path in paths)]:
        try:
            open(path, mode)
            raise SystemExit(path)
        except OSError as error:
            assert error.errno in {refused}, error
            read_only += error.errno == {errno.EROFS}
assert read_only
assert sorted(os.environ) == ["LD_LIBRARY_PATH", "PWD"]
"""
    assert sandbox.passes(program)


def test_output_is_not_kept() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sandbox.passes("for _ in range(64):\n    print('x' * 2**22)")  # 256 MiB
    assert not sandbox.passes("while True:\n    print('x' * 2**22)")
    assert not sandbox.passes("import os\nfor fd in range(16):\n    os.write(fd, b'x' * 2**28)")
    assert not sandbox.passes("import os\nwhile True:\n    os.write(3, b'x' * 2**16)")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 100 * 1024  # KiB


def test_a_program_dies_with_the_process_that_runs_it() -> None:
    mark = f"# {os.urandom(8).hex()}"
    code = f"""
from peagle.bench import sandbox
source = sandbox.runner() + {mark!r}
sandbox.runner = lambda: source
sandbox.passes("while True: pass")
"""
    with subprocess.Popen([sys.executable, "-c", code]) as runner:
        assert within(30, lambda: len(running(mark)) == 3)  # bwrap here, bwrap inside, the program
        runner.kill()
    assert within(5, lambda: not running(mark))


def running(mark: str) -> list[psutil.Process]:
    """The processes whose arguments end with a mark."""
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if (process.info["cmdline"] or [""])[-1].endswith(mark)]


def within(seconds: float, happens: Callable[[], bool]) -> bool:
    """Whether something happens in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if happens():
            return True
        time.sleep(0.05)
    return False
