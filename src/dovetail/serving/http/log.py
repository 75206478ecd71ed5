"""The server's log: one line per request, and what happens to the engine, on stderr as text or as JSON lines.

    2026-11-18T16:30:00.123Z INFO POST /v1/completions 200 · 12 → 30 tokens, first after 0.031 s, 0.812 s · cmpl-7f…
    {"time": …, "level": "info", "method": "POST", "route": "/v1/completions", "status": 200, "prompt_tokens": 12, …}

Prompts are not in it unless the server is started with --log-prompts. A /health that answers 200 is left out.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.base.errors import printable
from dovetail.serving.client import LOG, LogFormat
from dovetail.serving.http.run import Run

RUN, REQUEST_ID, PROMPT = "dovetail.run", "dovetail.request_id", "dovetail.prompt"  # keys of the scope, for the log
LONGEST_PATH, LONGEST_PROMPT = 200, 2000  # characters
LOGGERS = (LOG.name, "uvicorn.error")
HEALTH = "/health"


class RequestLog:
    """ASGI middleware that logs each request when its answer has ended."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and log it."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        begin, status = time.perf_counter(), 0

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            if scope["path"] != HEALTH or status != 200:
                log_request(scope, status, time.perf_counter() - begin)
        return None


def log_request(scope: Scope, status: int, seconds: float) -> None:
    """Log one request; status 0 is one whose client went away before the answer began."""
    route = printable(scope["path"], LONGEST_PATH)
    fields: dict[str, Any] = {"method": scope["method"], "route": route, "status": status, "seconds": round(seconds, 4)}
    message = f"{printable(scope['method'], 20)} {route} {status} ·"
    if isinstance(run := scope.get(RUN), Run):
        usage = run.usage()
        fields |= {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
        fields["first_token_seconds"] = None if run.first_seconds is None else round(run.first_seconds, 4)
        message += f" {usage['prompt_tokens']} → {usage['completion_tokens']} tokens,"
        message += "" if run.first_seconds is None else f" first after {run.first_seconds:.3f} s,"
    message += f" {seconds:.3f} s"
    if (number := scope.get(REQUEST_ID)) is not None:
        fields["request_id"] = number
        message += f" · {number}"
    if (prompt := scope.get(PROMPT)) is not None:
        fields["prompt"] = prompt[:LONGEST_PROMPT]
        message += f" · {printable(prompt, LONGEST_PROMPT)}"
    LOG.log(logging.ERROR if status >= 500 else logging.INFO, message, extra={"fields": fields})


class LogFormatter(logging.Formatter):
    """Lines of text, or JSON objects."""

    def __init__(self, form: LogFormat) -> None:
        super().__init__()
        self.form = form

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        when, message = moment.replace("+00:00", "Z"), record.getMessage()
        cause = "" if record.exc_info is None else self.formatException(record.exc_info)
        if self.form == "text":
            return f"{when} {record.levelname} {message}" + (f"\n{cause}" if cause else "")
        fields = getattr(record, "fields", None) or {"message": message}
        return json.dumps({"time": when, "level": record.levelname.lower(), **fields, **({"cause": cause} if cause else {})})


@contextlib.contextmanager
def logging_to_stderr(form: LogFormat) -> Iterator[None]:
    """Write the server's log to stderr inside the block; the loggers are as before behind it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(form))
    before = {name: (logging.getLogger(name).level, logging.getLogger(name).propagate) for name in LOGGERS}
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.propagate = False
    LOG.setLevel(logging.INFO)
    try:
        yield
    finally:
        for name, (level, propagate) in before.items():
            logger = logging.getLogger(name)
            logger.removeHandler(handler)
            logger.level, logger.propagate = level, propagate
