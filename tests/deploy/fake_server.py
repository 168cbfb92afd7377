"""Stands in for `peagle serve` as a process: PORT [healthy|dumb|unhealthy|dead]."""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = os.environ.get("PEAGLE_API_KEY")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.reply(503 if sys.argv[2] == "unhealthy" else 200, {})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print("asked", asked["model"], asked["messages"][-1]["role"], flush=True)
        if self.headers["Authorization"] != f"Bearer {KEY}":
            self.reply(401, {})
        elif sys.argv[2] == "dumb":
            self.reply(500, {})
        else:
            self.reply(200, {"choices": [{"message": {"role": "assistant", "content": "Hello."}}]})

    def reply(self, code: int, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    print("starting", "with a key" if KEY else "without a key", flush=True)
    if sys.argv[2] == "dead":
        sys.exit("no such model")
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
