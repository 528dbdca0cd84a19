"""A window of request ids: bounded requests in flight, each with a slot for its reply."""
from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Callable, Optional

from .wire import Connection


@dataclass
class Pending:
    rid: int
    conn: Optional[Connection] = None
    reply: Optional[bytes] = None
    then: Optional[Callable[[bytes], None]] = None


class RequestWindow:
    def __init__(self, size: int) -> None:
        self._ids = list(range(size))
        self._table: dict[int, Pending] = {}
        self._cv = threading.Condition()

    def open_request(self, then: Optional[Callable[[bytes], None]] = None) -> Pending:
        """Blocks until an id is free."""
        with self._cv:
            self._cv.wait_for(lambda: bool(self._ids))
            rid = self._ids.pop()
            pending = self._table[rid] = Pending(rid, then=then)
            return pending

    def close_request(self, pending: Pending) -> None:
        with self._cv:
            self._table.pop(pending.rid, None)
            self._ids.append(pending.rid)
            self._cv.notify()

    def resolve(self, rid: int, reply: bytes) -> Optional[Pending]:
        """Sets the reply and runs the continuation; whoever waits closes the request."""
        pending = self._table.get(rid)
        if pending is None:
            return None
        pending.reply = reply
        if pending.then is not None:
            pending.then(reply)
        return pending

    def __len__(self) -> int:
        return len(self._table)
