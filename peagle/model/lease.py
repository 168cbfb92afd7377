"""Which engine a target decodes for: one at a time.

A target has one set of feature layers and one mode, so two engines cannot take turns over it.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import ref


class TargetInUse(RuntimeError):
    """The target is decoding for another LLM, stream or thread; the message says what to do."""


class Decoder(Protocol):
    """What decodes over a target: an engine."""

    @property
    def idle(self) -> bool:
        """No request runs or waits."""


class Lease:
    """Held by the engine that has requests; nothing needs to be given back. An engine that is idle,
    or has been deleted, holds nothing."""

    def __init__(self, target: str) -> None:
        self._target = target  # its name
        # Of the fields below, never held during a round. The garbage collector may close a stream,
        # and so come here, while this thread is here already.
        self._lock = threading.RLock()
        self._holder: Callable[[], Decoder | None] = lambda: None  # a weak reference
        self._thread = 0  # that used the target last
        self._busy = False  # it still does

    @contextmanager
    def turn(self, engine: Decoder, *, begin: bool = False) -> Iterator[None]:
        """Give `engine` the target for one round, or to `begin` requests.

        Raises TargetInUse, before anything has changed, while another engine has requests and while
        another thread runs a round; requests cannot begin beside those of another thread.
        """
        with self._lock:
            self._check(engine, begin)
            self._holder, self._thread = ref(engine), threading.get_ident()
            before = self._busy
            self._busy = True
        try:
            yield
        finally:
            self._busy = before

    def _check(self, engine: Decoder, begin: bool) -> None:
        holder = self._holder()
        idle = holder is None or holder.idle
        another = not idle and holder is not engine
        joining = not idle and begin
        if threading.get_ident() != self._thread and (self._busy or another or joining):
            why = "another thread decodes over it, and an LLM is not thread-safe"
            fix = "use one LLM a process, or one `peagle serve` for all"
            raise TargetInUse(f"target {self._target}: {why}: {fix}")
        if another:
            why = "another LLM decodes over it: finish or close its stream first"
            raise TargetInUse(f"target {self._target}: {why}")
