"""What the console's page asks for: its files, the catalog, deployments, who drafted what."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
from serving import MODEL, Running, Serve, until
from test_metrics import read
from typer.testing import CliRunner

from peagle.cli.deploy import app
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.server import auth, console
from peagle.server.pages import FOLDER

KEY = {"authorization": "Bearer secret"}
BODY = {"name": "smollm2-135m"}


def streamed(response: httpx2.Response) -> list[dict[str, Any]]:
    """The events of a stream that ends as it should."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def stand_in(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Runs in the place of `peagle`; its arguments are the command."""
    monkeypatch.setattr(console, "PYTHON", (sys.executable, "-c", f"import sys; {script}"))


def test_pages(serve: Serve) -> None:
    """They need no key, run nothing but themselves, and are in no frame."""
    running = serve(api_key="secret")
    with running.http() as http:
        page = http.get("/")
        names = re.findall(r'(?:src|href)="(.*?)"', page.text)
        assert "ui/main.js" in names and all(name.startswith("ui/") for name in names)
        for path in ["/", *(f"/ui/{file.name}" for file in FOLDER.iterdir())]:
            if path == "/ui/index.html":
                continue
            got = http.get(path)
            policy = got.headers["content-security-policy"]
            assert (got.status_code, got.headers["x-content-type-options"]) == (200, "nosniff")
            assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy and "*" not in policy
        for path in ("/peagle/console", "/peagle/catalog", "/metrics"):
            assert http.get(path).status_code == 401
            assert http.get(path, headers=KEY).status_code == 200
        assert http.get("/ui/../app.py").status_code == 401
        assert http.get("/ui/nothing.js", headers=KEY).status_code == 404


def test_nothing_from_elsewhere() -> None:
    """The page's files name no other place, and have no way to read text as markup."""
    for file in FOLDER.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//\w+\.|@import|url\(", text), file.name
        forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|DOMParser"
        assert not re.search(forbidden, text), file.name
        assert not re.search(r"<(script|style)>|\sstyle=|\son\w+=", text), file.name


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_who_drafted_what(running: Running, llm: LLM, path: str) -> None:
    asked = {"prompt": "the cat sat"} if path == "completions" else {}
    asked = asked or {"messages": [{"role": "user", "content": "the cat sat"}]}
    body = asked | {"max_tokens": 40, "temperature": 0, "stream": True, "ignore_eos": True}
    with running.http() as http:
        plain = streamed(http.post(f"/v1/{path}", json=body))
        assert not any("peagle_drafts" in part["choices"][0] for part in plain)
        body |= {"stream_options": {"peagle_drafts": True}}
        parts = [e["choices"][0] for e in streamed(http.post(f"/v1/{path}", json=body))]
        ids = http.post("/tokenize", json=asked).json()["tokens"]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    run = llm.stream([ids], params)
    wanted = [(chunk.text, chunk.place, chunk.source) for chunk in run]
    drafts = [part["peagle_drafts"] for part in parts if "peagle_drafts" in part]
    pieces = [(p["text"], p["place"], p["source"]) for draft in drafts for p in draft["pieces"]]
    assert pieces == wanted and {place for _, place, _ in pieces} >= {0, 1}
    [done] = run.completions()
    last, stats = drafts[-1], done.stats
    assert (last["tokens"], last["rounds"]) == (40, stats.rounds)
    assert last["accepted"] == sum(stats.accepted) > 0
    assert (last["drafted"], last["forwards"]) == (stats.drafted, stats.forwards)
    assert last["accepted_from_lookup"] == stats.accepted_from_lookup
    said = [part.get("text") or part.get("delta", {}).get("content", "") for part in parts]
    assert "".join(said) == "".join(text for text, _, _ in pieces) == done.text


def test_chosen_k(serve: Serve) -> None:
    running = serve()
    assert read(running)["peagle:spec_decode_chosen_k", ""] == 0
    body = {"model": MODEL, "prompt": "the cat", "max_tokens": 9, "temperature": 0}
    with running.http() as http:
        assert http.post("/v1/completions", json=body | {"ignore_eos": True}).status_code == 200
    assert read(running)["peagle:spec_decode_chosen_k", ""] == 3


def test_catalog(running: Running) -> None:
    with running.http() as http:
        about, rows = http.get("/peagle/console").json(), http.get("/peagle/catalog").json()
    assert about == {"method": "p-eagle", "drafts": "chain, K = 3", "deploys": True}
    [row] = [row for row in rows if row["name"] == "smollm2-135m"]
    assert row["command"] == "peagle deploy smollm2-135m --to local --yes --port 0"
    assert set(row["heads"]) == {"p-eagle", "eagle3"}
    assert row["heads"]["p-eagle"]["folder"] == "smollm2-135m-p-eagle", "no path of this machine"


def test_a_deployment(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command says on both streams, line by line, and how it ended."""
    said = "print(' '.join(sys.argv[1:])); print('so', file=sys.stderr); sys.exit(3)"
    stand_in(monkeypatch, said)
    running = serve(api_key="secret")
    with running.http() as http:
        headers = KEY | {"origin": running.url}
        events = streamed(http.post("/peagle/deploy", json=BODY, headers=headers))
        rows = http.get("/peagle/catalog", headers=KEY).json()
        [shown] = [row["command"] for row in rows if row["name"] == BODY["name"]]
        assert {"line": shown} in events and {"line": "so"} in events
        assert events[-1] == {"exit_code": 3}
        unknown = http.post("/peagle/deploy", json={"name": "smollm"}, headers=headers)
        assert unknown.status_code == 400 and "did you mean smollm2-135m?" in unknown.text


def test_a_deployment_that_is_left(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is interrupted as by Ctrl-C, so that it can take back what it began; then there is room
    for the next."""
    left = tmp_path / "left"
    stand_in(
        monkeypatch,
        "import pathlib, time\n"
        "try: print('begun', flush=True); time.sleep(60)\n"
        f"except KeyboardInterrupt: pathlib.Path({str(left)!r}).touch()",
    )
    running = serve()
    headers = {"origin": running.url}
    with running.http() as http:
        with http.stream("POST", "/peagle/deploy", json=BODY, headers=headers) as response:
            lines = response.iter_lines()
            assert "begun" in next(lines)
            second = streamed(http.post("/peagle/deploy", json=BODY, headers=headers))
            assert "a deployment is on" in second[0]["error"]["message"]
        until(left.exists)
        stand_in(monkeypatch, "print('again')")
        until(lambda: {"line": "again"} in streamed(
            http.post("/peagle/deploy", json=BODY, headers=headers)
        ))  # fmt: skip


@pytest.mark.parametrize(
    ("headers", "content", "status"),
    [
        ({}, None, 403),  # no browser
        ({"origin": "https://example.com"}, None, 403),
        ({"origin": "null"}, None, 403),
        ({"origin": "{url}", "sec-fetch-site": "cross-site"}, None, 403),
        ({"origin": "http://rebound.example", "host": "rebound.example"}, None, 403),
        ({"origin": "{url}", "content-type": "text/plain"}, b'{"name": "smollm2-135m"}', 400),
        ({"origin": "{url}", "content-type": ""}, b'{"name": "smollm2-135m"}', 400),
    ],
)
def test_not_for_others(
    running: Running,
    monkeypatch: pytest.MonkeyPatch,
    headers: dict[str, str],
    content: bytes | None,
    status: int,
) -> None:
    """Nothing runs for what another site can have a browser send, even without a key."""
    stand_in(monkeypatch, "print('run')")
    headers = {name: value.format(url=running.url) for name, value in headers.items()}
    body: dict[str, Any] = {"json": BODY} if content is None else {"content": content}
    with running.http() as http:
        got = http.post("/peagle/deploy", headers=headers, **body)
    assert got.status_code == status and "run" not in got.text.split(), got.text


def test_only_this_machine_without_a_key(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client elsewhere sees the command; it cannot run it, whatever it says of itself."""
    monkeypatch.setattr(auth, "loopback", lambda host: host == "localhost")
    stand_in(monkeypatch, "print('run')")
    headers = {"host": "localhost", "origin": "http://localhost"}
    with running.http() as http:
        assert not http.get("/peagle/console", headers=headers).json()["deploys"]
        got = http.post("/peagle/deploy", json=BODY, headers=headers)
    assert got.status_code == 403 and "give the server an `api_key`" in got.text


def test_the_command_is_peagles_own() -> None:
    """It knows all the options."""
    line = console._command("smollm2-135m")
    assert line[:2] == ["peagle", "deploy"]
    ran = CliRunner().invoke(app, [*line[2:], "--dry-run"])
    assert ran.exit_code == 0 and '"smollm2-135m"' in ran.output
