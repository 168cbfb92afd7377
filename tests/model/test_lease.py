"""A target decodes for one engine at a time. (Whole engines and threads: attacks/.)"""

import threading
from dataclasses import dataclass

import pytest

from peagle.model.lease import Lease, TargetInUse


@dataclass(eq=False)
class Engine:
    """As much of one as a lease asks for."""

    idle: bool = True


def begin(lease: Lease, engine: Engine) -> None:
    with lease.turn(engine, begin=True):
        engine.idle = False


def elsewhere(lease: Lease, engine: Engine, **how: bool) -> str:
    """What a turn in another thread is refused with."""
    said = [""]

    def take() -> None:
        try:
            with lease.turn(engine, **how):
                pass
        except TargetInUse as error:
            said[0] = str(error)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return said[0]


def test_another_engine_waits_for_the_end() -> None:
    lease, one, two = Lease("tiny"), Engine(), Engine()
    begin(lease, one)
    for how in (False, True):
        with pytest.raises(TargetInUse, match="target tiny: another LLM decodes over it"):
            lease.turn(two, begin=how).__enter__()
    with lease.turn(one):
        pass
    one.idle = True
    begin(lease, two)
    with pytest.raises(TargetInUse):
        begin(lease, one)


def test_an_engine_that_is_gone_holds_nothing() -> None:
    lease, one = Lease("tiny"), Engine()
    begin(lease, one)
    del one
    begin(lease, Engine())


def test_threads() -> None:
    """A round excludes all others; between rounds another thread may go on, but not begin."""
    lease, one = Lease("tiny"), Engine()
    begin(lease, one)
    with lease.turn(one):
        assert "another thread decodes over it" in elsewhere(lease, one)
        assert "another thread decodes over it" in elsewhere(lease, Engine())
    assert "another thread decodes over it" in elsewhere(lease, one, begin=True)
    assert elsewhere(lease, one) == ""
    one.idle = True
    assert elsewhere(lease, Engine(), begin=True) == ""


def test_a_turn_within_a_round_does_not_end_it() -> None:
    """As when a stream is closed by the garbage collector."""
    lease, one = Lease("tiny"), Engine()
    with lease.turn(one):
        with lease.turn(one):
            pass
        assert "another thread decodes over it" in elsewhere(lease, one)
    assert elsewhere(lease, one) == ""


def test_a_round_that_fails_ends() -> None:
    lease, one = Lease("tiny"), Engine()
    with pytest.raises(ValueError, match="broken"), lease.turn(one):
        raise ValueError("broken")
    assert elsewhere(lease, Engine()) == ""
