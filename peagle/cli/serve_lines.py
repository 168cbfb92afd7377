"""What `peagle serve` prints for people: the URL, a request to paste, and the console."""

import json
import shlex
from dataclasses import dataclass

import typer

PAGES = "peagle.server.middleware.Pages"  # serves the console in front of vLLM
THIS_MACHINE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that people are told of."""

    model: str  # as clients call it
    host: str  # as it was bound
    port: int
    key: str | None = None  # environment variable of the API key that requests need
    chat: bool = True  # whether the model has a chat template
    console: bool = True

    @property
    def url(self) -> str:
        """An address that this machine reaches."""
        host = THIS_MACHINE.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def lines(self) -> list[str]:
        """The URL, a curl command, the console. The API key itself is never shown."""
        console = f"{self.url}/" if self.console else f"-- --middleware {PAGES} adds it to vLLM"
        return [f"Serving {self.model} at {self.url}/v1", self.curl(), f"Console: {console}"]

    def curl(self) -> str:
        """A request that a POSIX shell runs as it is; the key comes from its variable."""
        body: dict[str, object] = {"model": self.model}
        if self.chat:
            path, body["messages"] = "chat/completions", [{"role": "user", "content": "Hello!"}]
        else:
            path, body["prompt"] = "completions", "Once upon a time"
        headers = ["-H 'Content-Type: application/json'"]
        if self.key:
            headers.append(f'-H "Authorization: Bearer ${self.key}"')
        data = shlex.quote(json.dumps(body | {"max_tokens": 64}))
        return f"curl {shlex.quote(f'{self.url}/v1/{path}')} {' '.join(headers)} -d {data}"

    def show(self) -> None:
        """Print the lines on stdout; the log is on stderr."""
        typer.echo("\n".join(self.lines()))
