"""Memory that a process keeps when it frees it."""

import ctypes

# glibc's mallopt: what to set, to what.
MMAP_THRESHOLD, TRIM_THRESHOLD, TOP_PAD = -3, -1, -2
KEPT = {MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: (1 << 31) - 1, TOP_PAD: 64 << 20}


def keep_freed_memory() -> None:
    """Have this process keep up to 2 GiB that it frees for what it allocates next. It would go back
    to the system, and new pages take longer than most of what training does with them. Only glibc
    can do it: elsewhere nothing changes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for name, value in KEPT.items():
            mallopt(name, value)
