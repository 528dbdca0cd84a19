"""Sessions to the decode workers. A session is a socket plus a stream id."""
from __future__ import annotations

import threading
from collections import deque
from typing import Any, Callable, Deque, Dict, List, Optional


class RpcError(Exception):
    retriable = False


class Unavailable(RpcError):
    retriable = True


class Session:
    def __init__(self, host: str, transport: Callable[[str, Any], Any]) -> None:
        self.host = host
        self._transport = transport
        self.broken = False
        self.epoch = 0

    def call(self, method: str, payload: Any = None) -> Any:
        try:
            return self._transport(method, payload)
        except OSError as e:
            self.broken = True
            raise Unavailable(str(e)) from e

    def call_async(self, method: str, payload: Any, done: Callable[[Any, Optional[Exception]], None]) -> None:
        try:
            res = self._transport(method, payload)
        except OSError as e:
            done(None, e)
        else:
            done(res, None)


class SessionPool:
    def __init__(self, host: str, transport: Callable[[str, Any], Any], size: int) -> None:
        self.host = host
        self._make = lambda: Session(host, transport)
        self._idle: Deque[Session] = deque(self._make() for _ in range(size))
        self._cv = threading.Condition()
        self.epoch = 0

    def lease(self, timeout: Optional[float] = None) -> Optional[Session]:
        with self._cv:
            if not self._cv.wait_for(lambda: bool(self._idle), timeout):
                return None
            return self._idle.popleft()

    def give(self, session: Session) -> None:
        with self._cv:
            self._idle.append(self._make() if session.broken else session)
            self._cv.notify()

    def lease_current(self, timeout: Optional[float] = None) -> Optional[Session]:
        """Like lease, but only sessions of the present epoch are any good."""
        s = self.lease(timeout)  # leak: a session of an old epoch is dropped, neither returned nor given
        if s is None:
            return None
        if s.epoch < self.epoch:
            return None
        return s

    def lease_refreshed(self, timeout: Optional[float] = None) -> Optional[Session]:
        s = self.lease(timeout)  # clean: near miss, None or handed on
        if s is not None and s.epoch < self.epoch:
            s.epoch = self.epoch
        return s

    def idle(self) -> int:
        return len(self._idle)


class Directory:
    """Host name to pool."""

    def __init__(self, pools: Dict[str, SessionPool]) -> None:
        self.pools = pools

    def lease_any(self, hosts: List[str]) -> Optional[Session]:
        for h in hosts:
            s = self.pools[h].lease(0)  # clean: near miss, goes round only with None
            if s is not None:
                return s
        return None

    def give(self, s: Session) -> None:
        self.pools[s.host].give(s)

    def lease_each(self, hosts: List[str]) -> Optional[List[Session]]:
        got: List[Session] = []
        for h in hosts:
            s = self.pools[h].lease(0.0)  # leak: hosts already leased are not given when a later one is busy
            if s is None:
                return None
            got.append(s)
        return got
