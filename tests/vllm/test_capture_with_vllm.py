"""A capture through the real vLLM is the one that transformers makes, within rounding.

`make test-vllm` runs this; PEAGLE_VLLM_PYTHON names the interpreter.
"""

from pathlib import Path

import pytest
from torch import Tensor

from peagle.bench.workload import human_eval
from peagle.data.captured import Captures
from peagle.data.example import Example
from peagle.model.config import default_feature_layers
from peagle.model.loader import load_target
from peagle.train.capture import CaptureConfig, capture, in_process, plan_capture
from peagle.vllm import capture as vllm_capture
from peagle.vllm.capture import Vllm, through_vllm

pytestmark = pytest.mark.vllm
WINDOW = 300  # tokens: a few windows


def far(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, over the magnitude of its row."""
    return float(((found - wanted).abs().amax(-1) / wanted.abs().amax(-1)).max())


def test_features_and_hidden_states_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vllm_python: str
) -> None:
    monkeypatch.setattr(vllm_capture, "WINDOW", WINDOW)
    target = load_target("smollm2-135m", dtype="float32")
    assert target.tokenizer is not None
    ids = [target.tokenizer.encode(prompt) for prompt in human_eval()[-6:]]
    data = [Example(one, [True] * len(one)) for one in ids]
    layers = (*default_feature_layers(len(target.layers)), len(target.layers))
    theirs, exact = through_vllm(Vllm(Path(vllm_python)), target, layers, tmp_path / "vllm"), []

    def noted(documents: list[list[int]]):
        for output in theirs(documents):
            exact.append(output)
            yield output

    for name, run in (("vllm", noted), ("transformers", in_process(target, layers))):
        plan = plan_capture(target, data, CaptureConfig(tmp_path / name, feature_layers=layers))
        capture(run, data, tmp_path / name, plan)
    wanted = list(in_process(target, layers)([example.ids for example in data]))
    for one, other in zip(exact, wanted, strict=True):
        assert far(one.hidden, other.hidden) < 1e-4
        assert far(one.features, other.features) < 1e-4
    read, ours = Captures([tmp_path / "vllm"]), Captures([tmp_path / "transformers"])
    assert read.parts[0].origin == ours.parts[0].origin
    assert [*read] == [*ours] == data
    for number in range(len(data)):
        one, other = (captured.output([number], target) for captured in (read, ours))
        assert far(one.hidden, other.hidden) < 1 / 128
        assert far(one.features, other.features) < 1 / 128
