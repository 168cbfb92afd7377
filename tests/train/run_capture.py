"""A capture of the tiny target that kills itself: `run_capture.py FOLDER SHARD_BYTES DOCUMENT`."""

import os
import signal
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import make_target, own_answers

from peagle.train.capture import CaptureConfig, capture, in_process, plan_capture


def main() -> None:
    torch.set_num_threads(1)
    folder, shard_bytes, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    target = make_target()
    data = own_answers(target, 24)
    config = CaptureConfig(folder, feature_layers=(1, 2, 3), shard_bytes=shard_bytes)
    seen = list[None]()

    def on_document() -> None:
        seen.append(None)
        if len(seen) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    plan = plan_capture(target, data, config)
    capture(in_process(target, plan.origin.feature_layers), data, folder, plan, on_document)


if __name__ == "__main__":
    main()
