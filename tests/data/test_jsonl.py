"""A data file has one writer: a second one is refused, and changes nothing."""

from pathlib import Path

from refusals import refused
from tiny import make_target

from peagle.data.chat import Conversation
from peagle.data.records import append, open_to_append, read_back
from peagle.data.regenerate import regenerate
from peagle.data.synth import SynthConfig, synthesize
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams

HALF = b'{"record": 0}\n{"record": 1, "mess'


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    output = tmp_path / "new" / "out.jsonl"
    with open_to_append(output) as file:
        append(file, [{"record": 0}])
        with refused("output"):
            open_to_append(output)
        append(file, [{"record": 1}])
    with open_to_append(output) as file:
        found = read_back(file, "regenerate", lambda line: line["record"])
    assert found == [(0, 0), (1, 14)]


def test_a_line_that_a_kill_cut_off_is_written_again(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_bytes(HALF)
    with open_to_append(output) as file:
        assert read_back(file, "regenerate", lambda line: line["record"]) == [(0, 0)]
        append(file, [{"record": 1}])
    assert output.read_bytes() == b'{"record": 0}\n{"record": 1}\n'


def test_a_second_run_leaves_a_half_written_line_to_the_first(tmp_path: Path) -> None:
    llm, output = LLM(make_target()), tmp_path / "out.jsonl"
    asks = [Conversation([[{"role": "user", "content": "the cat"}]])] * 2
    output.write_bytes(HALF)
    with open_to_append(output):
        with refused("output"):
            regenerate(llm, asks, output, SamplingParams(max_tokens=2))
        with refused("output"):
            synthesize(llm, output, SynthConfig(1))
    assert output.read_bytes() == HALF


def test_an_output_that_cannot_be_opened(tmp_path: Path) -> None:
    with refused("output"):
        open_to_append(tmp_path)
