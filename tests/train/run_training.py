"""One training process on the tiny target: `run_training.py FOLDER SETTINGS`; resumes by itself."""

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import make_target, own_answers

from peagle.train import trainee
from peagle.train.config import TrainConfig
from peagle.train.resume import resume
from peagle.train.spec import HeadSpec
from peagle.train.state import checkpoints
from peagle.train.trainer import Trainer
from peagle.train.walk import Walk, acceptance
from peagle.train.warm_start import new_drafter


def main() -> None:
    torch.set_num_threads(1)
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    method, bf16 = settings.pop("method", "p-eagle"), settings.pop("bf16", True)
    if settings.pop("uneven", False):  # gradients do not depend on the number of passes
        settings["segments"] += int(os.environ["RANK"])
    kill = settings.pop("kill", None)
    stop = settings.pop("stop", None)
    if "nodes" in settings:  # where one machine plays several
        os.environ["GROUP_WORLD_SIZE"] = str(settings.pop("nodes"))
    target = make_target()
    data = own_answers(target, 12)
    torch.manual_seed(0)
    spec = HeadSpec(method, layers=2, depths=4, draft_vocab=100, feature_layers=(1, 2, 3))
    drafter = new_drafter(target, [e.ids for e in data], spec)
    measure = partial(acceptance, Walk(target, own_answers(target, 2)))
    trainer = Trainer(TrainConfig(folder, **settings), target, drafter, data, measure)
    if not bf16:
        trainee.multiplies_bf16 = lambda device: False
    if checkpoints(folder):
        resume(trainer)

    def on_step(metrics: dict[str, Any]) -> None:
        if metrics["step"] == kill and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        if metrics["step"] == stop and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGINT)

    trainer.run(on_step)
    (folder / "done").touch()


if __name__ == "__main__":
    main()
