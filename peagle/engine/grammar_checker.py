"""A check, in another process, that a grammar can be compiled without harm.

llguidance is native code: a grammar that is chained or nested too deeply overflows its stack and
ends the process, with all requests in it. `grammar_checker_process.py` compiles every new grammar
first, with less stack than any thread here has.
"""

import json
import resource
import select
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("grammar_checker_process.py")
SECONDS = 2  # CPU time for one grammar
PATIENCE = 30  # seconds until the process is taken for dead; it starts in less than one
MEMORY = 2**29  # bytes
STACK = 2**22  # bytes; every thread has at least twice as much
UNLIMITED_STACK = 2**21  # bytes of a thread's stack where `ulimit -s` is unlimited (glibc)


class GrammarChecker:
    """A process that tries grammars. It starts with the first one, or by `start`, and ends with
    this object."""

    def __init__(
        self, tokenizer: str, vocabulary: int, ends: list[int], limits: dict[str, Any]
    ) -> None:
        """`tokenizer` is the JSON of a fast tokenizer; `limits` are fields of LLParserLimits."""
        setup = {"tokenizer": tokenizer, "vocabulary": vocabulary, "ends": ends, "limits": limits}
        self._setup = setup | {"stack": _stack(), "memory": MEMORY, "seconds": SECONDS}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the process now, not with the first grammar."""
        with self._lock:
            self._process = self._process or self._start()

    def refusal(self, grammar: str) -> str | None:
        """The reason why a grammar, in llguidance's own form, must not be compiled; None if it may
        be, even if the compiler then finds a fault in it.

        Raises RuntimeError when the process cannot be run.
        """
        with self._lock:
            return _reason(self._try(grammar))

    def _try(self, grammar: str) -> int:
        """The exit code of a process that compiled it."""
        for _ in range(2):  # start again if the process has died
            process = self._process = self._process or self._start()
            with suppress(BrokenPipeError):
                print(json.dumps(grammar), file=process.stdin, flush=True)
                if line := _answer(process):
                    return int(line)
            _end(process)
            self._process = None
        raise RuntimeError(f"grammars cannot be tried: {PROGRAM.name} ends or does not answer")

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C is for the server, which ends it
        )
        weakref.finalize(self, _end, process)
        with suppress(BrokenPipeError):  # it has ended already
            print(json.dumps(self._setup), file=process.stdin, flush=True)
        return process


def _stack() -> int:
    """Bytes of stack that every thread of this process has twice."""
    soft = resource.getrlimit(resource.RLIMIT_STACK)[0]
    smallest = UNLIMITED_STACK if soft == resource.RLIM_INFINITY else soft
    return min(STACK, smallest // 2)


def _answer(process: subprocess.Popen[str]) -> str:
    """The answer; empty when the process has ended or does not answer."""
    assert process.stdout is not None
    ready = select.poll()  # `select` fails where a thousand files are open
    ready.register(process.stdout, select.POLLIN)
    return process.stdout.readline() if ready.poll(1000 * PATIENCE) else ""


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(BrokenPipeError), process:  # unread input
        process.kill()


def _reason(code: int) -> str | None:
    """The reason that an exit code gives, negative for a signal; None for success."""
    if code >= 0:
        return "cannot be compiled" if code else None
    if -code in (signal.SIGXCPU, signal.SIGALRM):
        return f"takes more than {SECONDS} seconds to compile"
    return f"breaks the compiler ({signal.Signals(-code).name})"
