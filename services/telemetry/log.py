"""Logging: structlog over the standard library, as JSON lines or text, with the values bound to the current task
(request id, model, device)."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any

import structlog

PLAIN = structlog.dev.plain_traceback
"""How a trace is written: without the values of variables, among which are prompts and keys; the prettier formatters
print them."""


def configure(service: str, level: str = "info", style: str = "auto") -> None:
    """Sets up logging of this process, the standard library's loggers included. Call it once, before anything logs."""
    as_text = style == "text" or (style == "auto" and sys.stderr.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    last: Any = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=PLAIN)
        if as_text
        else structlog.processors.JSONRenderer()
    )

    def name_service(_logger: Any, _method: str, event: Any) -> Any:
        event["service"] = service
        return event

    render: list[Any] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if not as_text:
        render += [structlog.processors.format_exc_info]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[name_service, *render, last])
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("asyncio", "uvicorn.access", "httpx", "grpc"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def get(name: str) -> Any:
    """The logger of a module: `log = log.get(__name__)`, then `log.info("what happened", number=3)`."""
    return structlog.get_logger(name)


def bound(**values: Any) -> contextlib.AbstractContextManager[None]:
    """A context in which `values` are added to every logged line."""
    return structlog.contextvars.bound_contextvars(**values)


def bind(**values: Any) -> None:
    """Adds `values` to every line that the current task logs from now on."""
    structlog.contextvars.bind_contextvars(**values)
