"""Trace spans around the relay between the gateway and the model workers."""
from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional

from spanline import spans

from relay.transport import Disconnected, Transport

log = logging.getLogger(__name__)


class Hop:
    """One open span together with what is needed to close it."""

    def __init__(self, name: str, span: Any, sampled: bool) -> None:
        self.name = name
        self.span = span
        self.sampled = sampled
        self.started = time.monotonic()

    def close(self, status: str = "ok") -> None:
        self.span.tag("status", status)
        self.span.tag("elapsed", time.monotonic() - self.started)
        spans.finish(self.span)


def open_hop(name: str, sampled: bool = True) -> Hop:
    span = spans.begin(name)  # clean: wrapped in the hop that is returned
    span.tag("sampled", sampled)
    return Hop(name, span, sampled)


@contextmanager
def hop(name: str, **tags: Any) -> Iterator[Any]:
    span = spans.begin(name)  # clean: finished in the finally after the yield
    try:
        for key, value in tags.items():
            span.tag(key, value)
        yield span
    finally:
        spans.finish(span)


@contextmanager
def quiet_hop(name: str) -> Iterator[Any]:
    span = spans.begin(name)  # leak: a disconnect in the body is swallowed without finishing the span
    try:
        yield span
    except Disconnected:
        log.info("peer left during %s", name)
        return
    spans.finish(span)


class Relay:
    def __init__(self, transport: Transport, retries: int) -> None:
        self._transport = transport
        self._retries = retries
        self._open: Dict[str, Hop] = {}
        self._root: Optional[Any] = None
        self._idle: Optional[Any] = None

    def __enter__(self) -> "Relay":
        self._root = spans.begin("relay")  # leak: __exit__ returns before finishing it when the transport is already closed
        return self

    def __exit__(self, exc_type, exc, tb) -> None:
        self.leave_idle()
        for one in self._open.values():
            one.close("aborted")
        self._open.clear()
        if self._transport.closed:
            return
        self._transport.close()
        spans.finish(self._root)

    def enter_idle(self) -> None:
        if self._idle is None:
            self._idle = spans.begin("idle")  # clean: guarded, leave_idle finishes it

    def leave_idle(self) -> None:
        idle, self._idle = self._idle, None
        if idle is not None:
            idle.finish_now()

    def forward(self, payload: bytes) -> Optional[bytes]:
        for attempt in range(self._retries):
            attempt_span = spans.begin("forward")  # leak: a disconnect starts the next attempt with the span still open
            try:
                reply = self._transport.ask(payload)
            except Disconnected:
                log.warning("attempt %d failed", attempt)
                continue
            attempt_span.finish_now()
            return reply
        return None

    def forward_once(self, payload: bytes) -> Optional[bytes]:
        attempt_span = spans.begin("forward-once")  # clean: near miss, the handler finishes it before returning and the else arm afterwards
        try:
            reply = self._transport.ask(payload)
        except Disconnected:
            attempt_span.tag("status", "lost")
            attempt_span.finish_now()
            return None
        else:
            spans.finish(attempt_span)
        return reply

    def stream_started(self, stream: str) -> None:
        opened = open_hop("stream")  # clean: near miss, setdefault keeps the older hop and the duplicate is closed
        current = self._open.setdefault(stream, opened)
        if current is not opened:
            opened.close("duplicate")

    def stream_ended(self, stream: str) -> None:
        ended = self._open.pop(stream, None)
        if ended is not None:
            ended.close()

    def ping(self, sampled: bool) -> float:
        probe = open_hop("ping", sampled)  # leak: the hop is only closed when it is sampled
        self._transport.ask(b"ping")
        if probe.sampled:
            probe.close()
        return time.monotonic() - probe.started

    def later(self, done: Callable[[], None]) -> None:
        span = spans.begin("deferred")  # clean: near miss, the callback finishes it

        def on_flush() -> None:
            done()
            spans.finish(span)

        self._transport.on_flush(on_flush)


def relay_batch(transport: Transport, payloads: List[bytes]) -> List[bytes]:
    replies: List[bytes] = []
    with hop("batch", size=len(payloads)) as batch:  # clean: the context manager finishes it
        for payload in payloads:
            with spans.span_scope("item"):  # clean: lease finishes by itself
                replies.append(transport.ask(payload))
        batch.tag("replies", len(replies))
    summary = spans.begin("summary")  # clean: handed to the exporter
    summary.tag("bytes", sum(map(len, replies)))
    transport.exporter.export_later(summary)
    return replies
