"""What the proxy tells its operators: Prometheus metrics and one JSON line per request, never a prompt or a key."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, TextIO

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

LOGGER = logging.getLogger("isophase.serve")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters of one proxy, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter(
            "isophase_requests", "Requests answered", ["route", "policy", "status"], registry=registry
        )
        self.seconds = Histogram(
            "isophase_request_seconds", "Time of a request", ["route", "policy"], buckets=_SECONDS, registry=registry
        )
        self.in_flight = Gauge("isophase_in_flight", "Requests to the server that are reserved", registry=registry)
        self.votes = Counter(
            "isophase_votes", "Votes: agreed, disagreed, failed, or unvoted", ["outcome"], registry=registry
        )
        self.settled = Counter("isophase_votes_settled_early", "Votes that left shifts out", registry=registry)
        self.shifts = Counter("isophase_shifts", "Requests asked by votes", registry=registry)
        self.tokens = Counter("isophase_vote_tokens", "Tokens of votes", ["direction"], registry=registry)
        self.unlike = Counter(
            "isophase_shifts_off", "Shifts that made another number of tokens than meant", registry=registry
        )
        self.faults = Counter("isophase_upstream_faults", "Faults of the server", ["kind"], registry=registry)
        for outcome in ("agreed", "disagreed", "failed", "unvoted"):
            self.votes.labels(outcome)

    def page(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class JsonLines(logging.Formatter):
    """One JSON object a record. Of an exception only its type: its words may hold what a client sent."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage().splitlines()[0] if record.getMessage() else "",
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[0]:
            line["exception"] = record.exc_info[0].__name__
        return json.dumps(line)


def say(event: str, level: int = logging.INFO, **fields: Any) -> None:
    """Log an event; fields without a value are left out."""
    LOGGER.log(level, event, extra={"fields": {name: value for name, value in fields.items() if value is not None}})


def log_to(stream: TextIO) -> None:
    """Send the lines of the proxy, and the warnings of its server, to a stream."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    for name, level in (("isophase.serve", logging.INFO), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(level)
