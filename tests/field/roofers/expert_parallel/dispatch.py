from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Callable, Optional

from .buffers import DispatchBuffers, ExchangeBuffer
from .permits import TokenPermits

log = logging.getLogger(__name__)

Rows = list[list[float]]


@dataclass
class Inflight:
    """One dispatch between its launch and its combine."""

    buf: ExchangeBuffer
    tokens: int


class Dispatcher:
    def __init__(self, buffers: DispatchBuffers, permits: TokenPermits, a2a: Callable[[ExchangeBuffer, Optional[ExchangeBuffer]], bool]) -> None:
        self.buffers = buffers
        self.permits = permits
        self.a2a = a2a

    def dispatch(self, rows: Rows) -> Optional[Inflight]:
        if not self.permits.reserve(len(rows)):  # leak: kept when there is no buffer
            return None
        buf = self.buffers.get(len(rows))  # clean: moved into the in-flight record
        if buf is None:
            log.debug("no dispatch buffer for %d rows", len(rows))
            return None
        buf.data = [list(r) for r in rows]
        self.a2a(buf, None)
        return Inflight(buf, len(rows))

    def dispatch_low_latency(self, rows: Rows) -> Optional[Inflight]:
        buf = self.buffers.get(len(rows))  # clean: moved into the record, or put back without credit
        if buf is None:
            return None
        if not self.permits.reserve(len(rows), timeout=0.001):  # clean: the record carries the credit
            self.buffers.put(buf)
            return None
        buf.data = [list(r) for r in rows]
        self.a2a(buf, None)
        return Inflight(buf, len(rows))

    def combine(self, inf: Inflight) -> Rows:
        out = [list(r) for r in inf.buf.data]
        self.buffers.put(inf.buf)
        self.permits.unreserve(inf.tokens)
        return out

    def roundtrip(self, rows: Rows) -> Optional[Rows]:
        src, dst = self.buffers.get_pair(len(rows))  # leak: a refused exchange puts back the source only
        if src is None or dst is None:
            return None
        src.data = [list(r) for r in rows]
        if not self.a2a(src, dst):
            self.buffers.put(src)
            return None
        out = [list(r) for r in dst.data]
        self.buffers.put(dst)
        self.buffers.put(src)
        return out
