"""A seccomp filter that allows a process to compute and to read files, and refuses all else.

It is made here as bytes (classic BPF, see seccomp(2)), because a sandbox holds no library for it.
"""

import errno
import struct

from peagle.errors import InputError

# The value of AUDIT_ARCH_* in linux/audit.h, by `platform.machine()`.
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Name of a system call: its numbers on x86_64 and on aarch64, which lacks some of the older ones.
ALLOWED: dict[str, tuple[int, int | None]] = {
    # memory
    "brk": (12, 214),
    "madvise": (28, 233),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "munmap": (11, 215),
    # files that are open, and modules that are imported later
    "close": (3, 57),
    "fstat": (5, 80),
    "getcwd": (79, 17),
    "getdents64": (217, 61),
    "lseek": (8, 62),
    "lstat": (6, None),
    "newfstatat": (262, 79),
    "openat": (257, 56),
    "pread64": (17, 67),
    "read": (0, 63),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "readv": (19, 65),
    "stat": (4, None),
    "statx": (332, 291),
    "write": (1, 64),
    "writev": (20, 66),
    # clocks
    "clock_getres": (229, 114),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "getrusage": (98, 165),
    "gettimeofday": (96, 169),
    "nanosleep": (35, 101),
    "time": (201, None),
    "times": (100, 153),
    # signals that the process gets: their handlers, not sending any
    "restart_syscall": (219, 128),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    # the process itself
    "exit": (60, 93),
    "exit_group": (231, 94),
    "futex": (202, 98),
    "getpid": (39, 172),
    "getrandom": (318, 278),
    "gettid": (186, 178),
    "sched_yield": (24, 124),
}

# BPF instructions, and what a filter answers.
LOAD, IF_EQUAL, RETURN = 0x20, 0x15, 0x06
NUMBER_AT, ARCHITECTURE_AT = 0, 4  # offsets in struct seccomp_data
KILL_PROCESS, REFUSE, ALLOW = 0x80000000, 0x00050000 | errno.EPERM, 0x7FFF0000


def make_filter(machine: str) -> bytes:
    """The filter for a machine (as `platform.machine()` names it): an array of struct sock_filter.

    A call of another architecture (int 0x80) kills the process. Calls of x32 have numbers of their
    own, so they are refused as any other is. Raises InputError for an unknown machine.
    """
    code = [
        _instruction(LOAD, ARCHITECTURE_AT),
        _instruction(IF_EQUAL, _architecture(machine), skip_if_equal=1),
        _instruction(RETURN, KILL_PROCESS),
        _instruction(LOAD, NUMBER_AT),
    ]
    for number in allowed_numbers(machine):
        code += [_instruction(IF_EQUAL, number, skip_if_not=1), _instruction(RETURN, ALLOW)]
    return b"".join([*code, _instruction(RETURN, REFUSE)])


def allowed_numbers(machine: str) -> list[int]:
    """The numbers of the allowed system calls on a machine."""
    column = list(ARCHITECTURES).index(machine)
    numbers = [both[column] for both in ALLOWED.values()]
    return [number for number in numbers if number is not None]


def _architecture(machine: str) -> int:
    if machine not in ARCHITECTURES:
        known = " or ".join(ARCHITECTURES)
        raise InputError(f"--pass-at-1: programs cannot be run safely on {machine}: use {known}")
    return ARCHITECTURES[machine]


def _instruction(code: int, value: int, skip_if_equal: int = 0, skip_if_not: int = 0) -> bytes:
    return struct.pack("=HBBI", code, skip_if_equal, skip_if_not, value)
