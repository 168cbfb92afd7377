"""A stand-in for the hub's API: what huggingface_hub really asks when it uploads a folder."""

import base64
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN, COMMIT = "hf_stand_in", "0" * 40


class HubServer(ThreadingHTTPServer):
    """Repositories in memory; `status` other than 200 refuses everything with it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.status = 200
        self.large: tuple[str, ...] = (".safetensors",)  # stored outside git, as on the hub
        self.asked: list[str] = []
        self.made: dict[str, dict[str, Any]] = {}  # create_repo's payload by repository
        self.branches: list[str] = []
        self.commits: list[dict[str, Any]] = []  # branch, summary, files, large (oid by path)
        self.objects: dict[str, bytes] = {}  # by sha256
        self.thread = Thread(target=self.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self.thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    repo_id: str

    def do_GET(self) -> None:
        self._reply({}, 404 if self.server.status == 200 else self.server.status)

    def do_PUT(self) -> None:
        self.server.asked.append("PUT object")
        self.server.objects[self.path.rsplit("/", 1)[1]] = self._body()
        self._reply({})

    def do_POST(self) -> None:
        body, path = self._body(), self.path.split("?")[0]
        if self.server.status != 200:
            self._reply({"error": "refused"}, self.server.status)
        elif self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._reply({"error": "Invalid username or password."}, 401)
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._said("validate", {"warnings": [], "errors": []})
        elif path.endswith("/info/lfs/objects/batch"):
            self._batch(json.loads(body))
        else:
            _, _, _, owner, name, action, branch = path.split("/")
            self.repo_id = f"{owner}/{name}"
            assert self.repo_id in self.server.made
            actions = {"branch": self._branch, "preupload": self._modes, "commit": self._commit}
            actions[action](branch, body)

    def _create(self, asked: dict[str, Any]) -> None:
        repo_id = f"{asked['organization']}/{asked['name']}"
        known = repo_id in self.server.made
        self.server.made.setdefault(repo_id, asked)
        self._said("create", {"url": f"{self.server.url}/{repo_id}"}, 409 if known else 200)

    def _branch(self, branch: str, body: bytes) -> None:
        known = branch in self.server.branches
        self.server.branches.append(branch)
        self._said("branch", {}, 409 if known else 200)

    def _modes(self, branch: str, body: bytes) -> None:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(self.server.large) else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(body)["files"]
        ]
        self._said("preupload", {"files": files})

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = []
        for wanted in asked["objects"]:
            href = f"{self.server.url}/objects/{wanted['oid']}"
            objects.append({**wanted, "actions": {"upload": {"href": href}}})
        self._said("batch", {"transfer": "basic", "objects": objects})

    def _commit(self, branch: str, body: bytes) -> None:
        lines = [json.loads(line) for line in body.splitlines()]
        files, large = {}, {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                assert value["oid"] in self.server.objects, "uploaded before it is committed"
                large[value["path"]] = value["oid"]
        summary = lines[0]["value"]["summary"]
        made = {"branch": branch, "summary": summary, "files": files, "large": large}
        self.server.commits.append(made)
        address = f"{self.server.url}/{self.repo_id}/commit/{COMMIT}"
        self._said("commit", {"commitUrl": address, "commitOid": COMMIT})

    def _said(self, what: str, answer: dict[str, Any], status: int = 200) -> None:
        self.server.asked.append(what)
        self._reply(answer, status)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _reply(self, answer: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""
