"""A seccomp filter that allows a process to compute and to read files, and refuses all else.

It is made here as bytes (classic BPF, see seccomp(2)), because a sandbox holds no library for it.
"""

import errno
import struct
from functools import cache
from pathlib import Path

import yaml

from peagle.errors import InputError

# The value of AUDIT_ARCH_* in linux/audit.h, by `platform.machine()`.
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# BPF instructions, and what a filter answers.
LOAD, IF_EQUAL, RETURN = 0x20, 0x15, 0x06
NUMBER_AT, ARCHITECTURE_AT = 0, 4  # offsets in struct seccomp_data
KILL_PROCESS, REFUSE, ALLOW = 0x80000000, 0x00050000 | errno.EPERM, 0x7FFF0000


@cache
def make_filter(machine: str) -> bytes:
    """The filter for a machine (as `platform.machine()` names it): an array of struct sock_filter.

    A call of another architecture (int 0x80) kills the process. Calls of x32 have numbers of their
    own, so they are refused as any other is. Raises InputError for an unknown machine.
    """
    if machine not in ARCHITECTURES:
        known = " or ".join(ARCHITECTURES)
        raise InputError(f"`pass_at_1`: programs cannot be run safely on {machine}: use {known}")
    code = [
        _instruction(LOAD, ARCHITECTURE_AT),
        _instruction(IF_EQUAL, ARCHITECTURES[machine], skip_if_equal=1),
        _instruction(RETURN, KILL_PROCESS),
        _instruction(LOAD, NUMBER_AT),
    ]
    for number in allowed_numbers(machine):
        code += [_instruction(IF_EQUAL, number, skip_if_not=1), _instruction(RETURN, ALLOW)]
    return b"".join([*code, _instruction(RETURN, REFUSE)])


def allowed_numbers(machine: str) -> list[int]:
    """The numbers of the allowed system calls on a machine."""
    allowed = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return [numbers[machine] for numbers in allowed.values() if machine in numbers]


def _instruction(code: int, value: int, skip_if_equal: int = 0, skip_if_not: int = 0) -> bytes:
    return struct.pack("=HBBI", code, skip_if_equal, skip_if_not, value)
