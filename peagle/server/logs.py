"""Logs as JSON, a line each. No line holds text of a prompt or an answer."""

import json
import logging
from datetime import UTC, datetime


class JsonLines(logging.Formatter):
    """A record, with the `fields` it was given."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr() -> None:
    """Have the server's and uvicorn's logs written."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    for name in ("peagle", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.INFO if name == "peagle" else logging.WARNING)
