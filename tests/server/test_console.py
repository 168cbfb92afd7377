"""Routes of the console's page: its files, the catalog, sources of tokens."""

import json
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from serving import Running, Serve
from test_metrics import read
from tiny import make_target

from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.model.drafter import Drafter
from peagle.server.conversations import conversation_ids
from peagle.server.middleware import FOLDER

LANES = ["EAGLE-3", "EAGLE-3 + lookup", "P-EAGLE"]
KEY = {"authorization": "Bearer secret"}


def streamed(response: httpx2.Response) -> list[dict[str, Any]]:
    """The events of a stream that ends as it should."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_pages(serve: Serve) -> None:
    """Pages need no key, run only their own scripts, and are in no frame."""
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
def test_sources_of_tokens(running: Running, llm: LLM, path: str) -> None:
    asked = {"prompt": "the cat sat"} if path == "completions" else {}
    asked = asked or {"messages": [{"role": "user", "content": "the cat sat"}]}
    body = asked | {"max_tokens": 40, "temperature": 0, "stream": True, "ignore_eos": True}
    plain = streamed(running.post(f"/v1/{path}", json=body))
    assert not any("peagle_drafts" in part["choices"][0] for part in plain)
    body |= {"stream_options": {"peagle_drafts": True}}
    parts = [e["choices"][0] for e in streamed(running.post(f"/v1/{path}", json=body))]
    prompt = asked.get("prompt") or conversation_ids(llm, asked["messages"], [], {})
    run = llm.stream([prompt], SamplingParams(max_tokens=40, ignore_eos=True))
    wanted = [(chunk.text, chunk.depth, chunk.source) for chunk in run]
    drafts = [part["peagle_drafts"] for part in parts if "peagle_drafts" in part]
    pieces = [(p["text"], p["place"], p["source"]) for draft in drafts for p in draft["pieces"]]
    assert pieces == wanted and {place for _, place, _ in pieces} >= {0, 1}
    [done] = run.completions()
    last, stats = drafts[-1], done.stats
    assert (last["tokens"], last["rounds"]) == (40, stats.rounds)
    assert last["accepted"] == sum(stats.accepted) > 0
    assert (last["drafted"], last["forwards"]) == (stats.drafted, stats.forwards)
    assert last["accepted_from_lookup"] == stats.accepted_from_lookup
    trees = [tree for draft in drafts for tree in draft["trees"]]
    assert len(trees) == stats.rounds
    assert sum(len(tree["nodes"]) for tree in trees) == stats.drafted
    assert sum(len(tree["accepted"]) for tree in trees) == sum(stats.accepted)
    emitted = [part.get("text") or part.get("delta", {}).get("content", "") for part in parts]
    assert "".join(emitted) == "".join(text for text, _, _ in pieces) == done.text


@pytest.mark.parametrize("options", [{"k": 3}, {"nodes": 9, "lookup": True}])
def test_drafts_as_trees(serve: Serve, drafter: Drafter, options: dict[str, Any]) -> None:
    """Round by round: the accepted nodes and the target's tokens after them spell each answer."""
    running = serve(LLM(make_target(), drafter, max_batch=2, kv_tokens=1024, **options))
    body = {"prompt": ["the cat sat on the mat. the cat sat on", "a dog ran"], "max_tokens": 60}
    body |= {"temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"peagle_drafts": True}}
    parts = [e["choices"][0] for e in streamed(running.post("/v1/completions", json=body))]
    for index in range(2):
        own = [part for part in parts if part["index"] == index]
        trees = [tree for part in own for tree in part["peagle_drafts"]["trees"]]
        spelled = trees[0]["before"]
        for tree in trees:
            assert spelled.endswith(tree["before"])
            spelled += "".join(tree["nodes"][i - 1] for i in tree["accepted"]) + tree["after"]
            for path in (tree["accepted"], tree["looked_up"]):
                assert [tree["parents"][i - 1] for i in path] == [0, *path][: len(path)]
            assert all(parent < i for i, parent in enumerate(tree["parents"], start=1))
            assert len(tree["nodes"]) == len(tree["parents"])
            assert all(0 < chance <= 1 for chance in tree["chances"])
            assert bool(tree["looked_up"]) <= bool(tree["matched"])
        spelled = re.sub(r"<[|\w]+>", "", spelled)  # special tokens have no text
        assert "".join(part["text"] for part in own).startswith(spelled)
        assert any(tree["accepted"] for tree in trees)
        assert any(tree["looked_up"] for tree in trees) == ("lookup" in options)


def test_chosen_k(serve: Serve) -> None:
    running = serve()
    assert read(running)["peagle:spec_decode_chosen_k", ""] == 0
    running.complete("the cat", max_tokens=9, temperature=0, extra_body={"ignore_eos": True})
    assert read(running)["peagle:spec_decode_chosen_k", ""] == 3


def test_catalog(running: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"my model": {"target": "owner/model", "heads": {}}}))
    monkeypatch.setenv("PEAGLE_CATALOG", str(file))
    about, listed = (running.get(f"/peagle/{part}").json() for part in ("console", "catalog"))
    lanes = about.pop("lanes")
    assert about == {"method": "p-eagle", "drafts": "K = 3"}
    assert [lane["title"] for lane in lanes] == ["Target alone", *LANES]
    assert ["no EAGLE-3 head" in (lane["missing"] or "") for lane in lanes] == [0, 1, 1, 0]
    rows = {row["name"]: row for row in listed}
    assert rows["my model"]["command"] == "peagle deploy 'my model'"
    row = rows["smollm2-135m"]
    assert row["command"] == "peagle deploy smollm2-135m"
    assert set(row["heads"]) == {"p-eagle", "eagle3"}
    assert row["heads"]["p-eagle"]["folder"] == "smollm2-135m-p-eagle", "no path of this machine"
