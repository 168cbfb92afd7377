"""Runs one program inside the sandbox. `sandbox.py` gives this file's text to the interpreter
there, which has the standard library only.

Stdin is a JSON object: `program`, `limits` (of `resource`, by name), `filter` (of seccomp, in hex)
and `token`. The token on stdout means that the program ended without an error.
"""

import ctypes
import json
import os
import resource
import struct
import sys

NO_NEW_PRIVILEGES, SET_SECCOMP, MODE_FILTER = 38, 22, 2  # linux/prctl.h, linux/seccomp.h


def main() -> None:
    """Give up what the program must not have, run it, and tell that it ended well."""
    task = json.load(sys.stdin)
    verdict = os.dup(1)
    os.dup2(2, 1)  # what the program prints goes where errors go
    for name, most in task["limits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    install(bytes.fromhex(task["filter"]))
    exec(compile(task["program"], "<program>", "exec"), {"__name__": "__main__"})
    # Not at the exit: a program that leaves early by os._exit(0) or SystemExit has not passed.
    os.write(verdict, task["token"].encode())
    os._exit(0)


def install(instructions: bytes) -> None:
    """Install a seccomp filter, an array of struct sock_filter, which nothing can take away."""
    libc = ctypes.CDLL(None, use_errno=True)
    held = ctypes.create_string_buffer(instructions, len(instructions))
    rules = struct.pack("HP", len(instructions) // 8, ctypes.addressof(held))  # struct sock_fprog
    _call(libc, NO_NEW_PRIVILEGES, 1)
    _call(libc, SET_SECCOMP, MODE_FILTER, rules)


def _call(libc: ctypes.CDLL, option: int, value: int, pointer: bytes | None = None) -> None:
    zero = ctypes.c_ulong(0)
    if libc.prctl(option, ctypes.c_ulong(value), pointer or zero, zero, zero):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


if __name__ == "__main__":
    main()
