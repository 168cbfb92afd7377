"""`benchmarks/engines.py`: its processes and its ratios, with fake engines."""

import sys
from contextlib import closing
from importlib import import_module

import pytest

ECHO = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request["prompts"] == []:
        sys.exit("nothing to do")
    ids = [prompt * request["max_tokens"] for prompt in request["prompts"]]
    print(json.dumps({"token_ids": ids, "seconds": 2.0, "acceptance_length": 1.5, "more": 0}))
    sys.stdout.flush()
"""


@pytest.fixture
def engines(benchmark_script):
    return benchmark_script("engines")


@pytest.fixture
def row(engines):
    def make(engine: str, method: str, seconds: list[float], weights="bf16", k=0, c=1):
        results = [engines.Decoded([[1] * 6], time, 1.0) for time in seconds]
        return engines.Row(engine, method, k, weights, c, None, results)

    return make


def test_a_peer_answers_until_it_fails(engines) -> None:
    peers = import_module("peers")
    with closing(peers.Peer([sys.executable, "-c", ECHO], {})) as peer:
        decode = peer.decoder({"method": "none"})
        assert decode([[7], [8]], 2) == ([[7, 7], [8, 8]], 2.0, 1.5)
        assert decode([[9]], 1).token_ids == [[9]]
        with pytest.raises(peers.PeerFailure, match="^nothing to do$"):
            decode([], 1)
        with pytest.raises(peers.PeerFailure, match="^nothing to do$"):  # it stays so
            decode([[9]], 1)
    assert not peer.log.exists()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("engines", "--concurrency 1,16 --prompts 3,12"),
        ("trees", "--concurrency 1,32"),
        ("trees", "--concurrency 1,4 --limit 2"),
    ],
)
def test_a_load_needs_as_many_prompts(
    benchmark_script, monkeypatch, capsys, name: str, line: str
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *line.split()])
    with pytest.raises(SystemExit) as ended:
        benchmark_script(name).main()
    assert ended.value.code == 2
    assert "--concurrency: more than there are prompts" in capsys.readouterr().err


def test_ratios_are_taken_within_repeats(engines, row) -> None:
    # A machine that is slow in the second repeat is slow for both.
    fast, slow = row("a", "none", [1.0, 9.0, 1.1]), row("b", "none", [2.0, 18.0, 2.2])
    assert engines.ratio(fast, slow) == pytest.approx(2.0)
    report = fast.report(slow)
    assert report["ratio"] == 2.0 and report["same"] == 1
    assert report["least"] < report["tokens_per_second"] < report["most"]


def test_unequal_work_is_refused(engines, row) -> None:
    short = row("a", "none", [])
    short.decode = lambda prompts, max_tokens: engines.Decoded([[1]], 1.0, 1.0)
    with pytest.raises(SystemExit, match="a bf16 none: not every answer has 2 tokens"):
        engines.measure([short], [[5]], 2, 1)
