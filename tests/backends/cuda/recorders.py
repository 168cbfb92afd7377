"""Recordings that are counted. Where there is no GPU they are played by running the function again,
over the same places."""

import inspect
from collections.abc import Callable

import torch
from tiny import make_target

from peagle.backends.cuda.graphs import Recorder, Replay
from peagle.model.target import Target

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def target_on_device() -> Target:
    target = make_target(layers=2)
    target.model.to(DEVICE)
    target.device = DEVICE
    return target


class CountingRecorder:
    """A Recorder; without a GPU one that plays."""

    count = 0  # recordings of all recorders; tests set it to 0

    def __init__(self) -> None:
        if DEVICE.type == "cuda":
            self.recorder = Recorder()

    def record(self, run: Callable[[], None]) -> Replay:
        CountingRecorder.count += 1
        if DEVICE.type == "cuda":
            return self.recorder.record(run)
        run()
        for place in inspect.getclosurevars(run).nonlocals["self"].outputs:
            place.fill_(float("nan"))  # a recording is not run: nobody may read what it would write
        return run
