"""pack/unpack pairs for ``torch.autograd.graph.saved_tensors_hooks``."""
from __future__ import annotations

from typing import Any, Callable, Dict, Tuple

from .pinned import PinnedBuffer, PinnedPool


class OffloadHooks:
    def __init__(self, pool: PinnedPool) -> None:
        self.pool = pool
        self._store: Dict[int, PinnedBuffer] = {}
        self._next = 0

    def pack(self, t: bytes) -> int:
        buf = self.pool.checkout(len(t))  # clean: stored under the ticket, unpack() checks it in
        buf.write(t)
        ticket = self._next
        self._next += 1
        self._store[ticket] = buf
        return ticket

    def unpack(self, ticket: int) -> bytes:
        buf = self._store.pop(ticket)
        out = buf.read()
        self.pool.checkin(buf)
        return out


class SelectiveHooks(OffloadHooks):
    def __init__(self, pool: PinnedPool, threshold: int) -> None:
        super().__init__(pool)
        self.threshold = threshold

    def pack(self, t: bytes) -> Any:
        buf = self.pool.checkout(len(t))  # leak: tensors under the threshold are returned as they are
        if len(t) < self.threshold:
            return t
        buf.write(t)
        ticket = self._next
        self._next += 1
        self._store[ticket] = buf
        return ticket

    def unpack(self, packed: Any) -> bytes:
        if isinstance(packed, bytes):
            return packed
        return super().unpack(packed)


class RecomputeHooks:
    """Offloads everything, but prefers recomputation where the op allows it."""

    def __init__(self, pool: PinnedPool, recompute: Callable[[int], bytes]) -> None:
        self.pool = pool
        self.recompute = recompute
        self._store: Dict[int, Tuple[PinnedBuffer, bool]] = {}

    def pack(self, t: bytes, cheap: bool) -> int:
        buf = self.pool.checkout(len(t))  # leak: unpack() of a cheap entry recomputes and drops the popped buffer
        buf.write(t)
        ticket = id(buf)
        self._store[ticket] = (buf, cheap)
        return ticket

    def unpack(self, ticket: int) -> bytes:
        buf, cheap = self._store.pop(ticket)
        if cheap:
            return self.recompute(ticket)
        out = buf.read()
        self.pool.checkin(buf)
        return out


class TieredHooks:
    def __init__(self, pool: PinnedPool, threshold: int) -> None:
        self.pool = pool
        self.threshold = threshold

    def pack(self, t: bytes) -> Tuple[str, Any]:
        if len(t) < self.threshold:
            return "device", t
        buf = self.pool.checkout(len(t))  # clean: near miss, travels in the packed tuple and unpack() checks it in
        buf.write(t)
        return "host", buf

    def unpack(self, packed: Tuple[str, Any]) -> bytes:
        where, payload = packed
        if where == "device":
            return payload
        try:
            return payload.read()
        finally:
            self.pool.checkin(payload)
