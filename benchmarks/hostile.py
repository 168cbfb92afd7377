"""What hostile requests cost the others, and the server's memory over 2,000 mixed requests.

    python benchmarks/hostile.py [--requests 2000] [--tree FOLDER] [--output FILE.json]

The real server with the demo target and its head. A neighbour streams answers; for every hostile
request its longest wait for a token is noted, beside the longest wait while there is none. Then
requests of all kinds, four at a time; the resident memory of the server's process after every 20
of them goes into the file and into a picture beside it. `--tree` serves another checkout.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil
from common import RESULTS, TARGET, environment, write_json

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "attacks"))

import hostile  # noqa: E402

HEAD = HERE.parent / "heads" / "smollm2-135m-p-eagle"
MB = 2**20
PATIENCE = 120  # seconds
CLIENTS = 4
JSON = {"content-type": "application/json"}
LISTS = {
    "a prompt of 8 MB": {"prompt": "the quick brown fox " * (8 * MB // 20)},
    "a prompt of 2 MB": {"prompt": "the quick brown fox " * (2 * MB // 20)},
    "100,000 prompts": {"prompt": ["the cat"] * 100_000},
    "300,000 lists of ids": {"prompt": [[1]] * 300_000},
    "a text, then 900,000 ids": {"prompt": ["a", *[1] * 900_000]},
}


class Served:
    """`peagle serve`, in a process of its own."""

    def __init__(self, tree: Path) -> None:
        environ = os.environ | {"PYTHONPATH": str(tree), "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "peagle", "serve", TARGET, "--head", str(HEAD)]
        command += ["--engine", "native"]
        self.process = subprocess.Popen(
            [*command, "--port", "0"], stderr=subprocess.PIPE, env=environ, cwd=tree, text=True
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("{") and (told := json.loads(line))["message"] == "serving":
                break
        self.url = f"http://{told['host']}:{told['port']}"
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        self.http = httpx2.Client(base_url=self.url, timeout=PATIENCE)
        while self.http.get("/health").status_code != 200:
            time.sleep(0.1)

    def memory(self) -> float:
        """MB of RAM."""
        return psutil.Process(self.process.pid).memory_info().rss / MB

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def longest_wait(served: Served, over: threading.Event, found: list[float]) -> None:
    """Stream answers until it is over; add the longest time between two tokens, or to the first."""
    body = {"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, "stream": True}
    worst = 0.0
    with (
        suppress(httpx2.TransportError),  # the server has ended
        httpx2.Client(base_url=served.url, timeout=PATIENCE) as http,
    ):
        while not over.is_set():
            last = time.monotonic()
            with http.stream("POST", "/v1/completions", json=body) as got:
                for _ in got.iter_lines():
                    now = time.monotonic()
                    worst = max(worst, now - last)
                    last = now
                    if over.is_set():
                        break
    found.append(worst)


def beside(served: Served, body: dict[str, Any] | None) -> dict[str, Any]:
    """Send a body while a neighbour streams; None: send nothing for two seconds."""
    over, found = threading.Event(), list[float]()
    content = json.dumps(body)  # before, or this process itself would make the neighbour wait
    neighbour = threading.Thread(target=longest_wait, args=(served, over, found))
    neighbour.start()
    time.sleep(1)
    began, status = time.monotonic(), 0
    try:
        if body is None:
            time.sleep(2)
        else:
            status = served.http.post("/v1/completions", content=content, headers=JSON).status_code
        taken = time.monotonic() - began
        time.sleep(0.3)
    except httpx2.TransportError as error:
        over.set()
        neighbour.join(PATIENCE)
        return {"ended": type(error).__name__}
    over.set()
    neighbour.join()
    return {"status": status, "seconds": round(taken, 3), "longest_wait": round(found[0], 3)}


def mixed(choose: random.Random) -> tuple[str, dict[str, Any]]:
    """A request of any kind."""
    words = " ".join(choose.choices(["the", "cat", "def", "x", "12", "größe", "({", "\n"], k=
                                    choose.choice([3, 30, 100, 300])))  # fmt: skip
    body: dict[str, Any] = {"max_tokens": choose.choice([1, 2, 4, 8])}
    if choose.random() < 0.3:
        body |= {"temperature": 0.8, "seed": choose.randrange(99), "n": choose.choice([1, 2, 3])}
    if choose.random() < 0.2:
        body |= {"frequency_penalty": 0.5, "logit_bias": {str(choose.randrange(49000)): 5}}
    if choose.random() < 0.2:
        name = f"key{choose.randrange(300)}"
        schema = {"type": "object", "properties": {name: {"enum": [name, 1]}}, "required": [name]}
        body |= {"structured_outputs": {"json": schema}}
    if choose.random() < 0.5:
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": words}]}
    if choose.random() < 0.2:
        return "/tokenize", {"prompt": words}
    return "/v1/completions", body | {"prompt": words}


def over_requests(served: Served, count: int) -> list[tuple[int, float]]:
    """(requests so far, MB) while `count` requests are answered."""
    choose, points = random.Random(11), [(0, served.memory())]
    with ThreadPoolExecutor(CLIENTS) as pool:
        for done in range(0, count, 20):
            asked = [mixed(choose) for _ in range(20)]
            answers = pool.map(lambda pair: served.http.post(pair[0], json=pair[1]), asked)
            wrong = [answer.text for answer in answers if answer.status_code != 200]
            assert not wrong, wrong[0]
            points.append((done + 20, served.memory()))
    return points


def draw(points: list[tuple[int, float]], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*points, strict=True))
    axes.set(xlabel="requests", ylabel="resident memory (MB)", ylim=(0, None))
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--tree", type=Path, default=HERE.parent)
    parser.add_argument("--output", type=Path, default=RESULTS / "hostile.json")
    args = parser.parse_args()
    served = Served(args.tree)
    waits = {}
    attacks = {name: {"prompt": "a", "max_tokens": 2, "structured_outputs": form}
               for name, form in hostile.fixed()}  # fmt: skip
    for name, body in {"nothing": None, "nothing, again": None, **LISTS, **attacks}.items():
        waits[name] = beside(served, body) | {"memory": round(served.memory())}
        print(f"{name:28}", waits[name], flush=True)
        if "ended" in waits[name]:
            served.close()
            served = Served(args.tree)
    served.close()
    served = Served(args.tree)
    points = over_requests(served, args.requests)
    served.close()
    write_json(args.output, {**environment(), "waits": waits, "memory": points})
    draw(points, args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
