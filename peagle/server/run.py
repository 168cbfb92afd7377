"""A server from its first request to its last."""

import logging
import socket
from types import FrameType

import uvicorn

from peagle.config import InputError
from peagle.engine.llm import LLM
from peagle.server.app import Api, ServerConfig, create_app
from peagle.server.gate import loopback

log = logging.getLogger(__name__)
LAST_WORDS = 10  # seconds that clients have, at the end, to read what was sent


class Server(uvicorn.Server):
    """Told to end, it lets running requests finish and takes no others; told twice, it cancels
    them. It ends by itself when its engine fails."""

    def __init__(self, api: Api) -> None:
        config = uvicorn.Config(
            create_app(api), log_config=None, access_log=False, server_header=False,
            timeout_graceful_shutdown=LAST_WORDS,
        )  # fmt: skip
        super().__init__(config)
        self.worker = api.worker

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal. (uvicorn's own would close the door at once, and end by the same signal.)"""
        if self.worker.draining:
            self.worker.cancel_all()
        self.worker.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether it is over."""
        if self.worker.failed or (self.worker.draining and not self.worker.open):
            self.should_exit = True
        return await super().on_tick(counter)


def check_host(host: str, api_key: str | None, allow_no_key: bool) -> None:
    """Raises InputError for an address that others reach, where nobody needs a key."""
    if api_key == "":
        raise InputError("--api-key '': is empty, give a key or leave it out")
    if api_key is None and not allow_no_key and not loopback(host):
        why = "others can reach it, give --api-key KEY (or --allow-no-key)"
        raise InputError(f"--host {host}: {why}")


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any that is free. Raises InputError when it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        why = f"{error}; choose another --host or --port"
        raise InputError(f"--host {host} --port {port}: {why}") from error
    found.listen(2048)
    return found


def serve(llm: LLM, config: ServerConfig, listening: socket.socket) -> bool:
    """Serve until told to end; whether it ended well."""
    api = Api(llm, config)
    server = Server(api)
    host, port = listening.getsockname()[:2]
    where = {"host": host, "port": port, "model": config.model, "context": api.context}
    drafting = {"method": llm.method, "k": llm.k, "kv_tokens": llm.engine.settings.kv_tokens}
    log.info("serving", extra={"fields": where | drafting})
    server.run(sockets=[listening])
    return not api.worker.failed
