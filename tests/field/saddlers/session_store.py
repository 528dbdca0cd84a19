"""Multi-turn sessions: each keeps a handle on its KV between turns and expires after a while."""
from __future__ import annotations

import heapq
from typing import Callable, Dict, List, Optional, Tuple


class KVHandle:
    def __init__(self, hid: int, tokens: int) -> None:
        self.hid = hid
        self.tokens = tokens


class HandleRegistry:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.open: Dict[int, KVHandle] = {}
        self._next = 0

    def register(self, tokens: int) -> Optional[KVHandle]:
        if len(self.open) >= self.limit:
            return None
        self._next += 1
        h = KVHandle(self._next, tokens)
        self.open[h.hid] = h
        return h

    def unregister(self, h: KVHandle) -> None:
        del self.open[h.hid]


def with_handle(reg: HandleRegistry, tokens: int, fn: Callable[[KVHandle], int]) -> int:
    h = reg.register(tokens)  # clean: finally unregisters
    if h is None:
        return -1
    try:
        return fn(h)
    finally:
        reg.unregister(h)


class SessionStore:
    def __init__(self, reg: HandleRegistry, ttl: float = 60.0) -> None:
        self.reg = reg
        self.ttl = ttl
        self.sessions: Dict[str, KVHandle] = {}
        self.expiry: List[Tuple[float, str]] = []
        self.hooks: List[Callable[[str, KVHandle], bool]] = []

    def open_session(self, sid: str, tokens: int, now: float) -> bool:
        if sid in self.sessions:
            return False
        h = self.reg.register(tokens)  # clean: sessions owns it, expire and close unregister
        if h is None:
            return False
        self.sessions[sid] = h
        heapq.heappush(self.expiry, (now + self.ttl, sid))
        return True

    def close_session(self, sid: str) -> None:
        h = self.sessions.pop(sid, None)
        if h is not None:
            self.reg.unregister(h)

    def expire(self, now: float) -> int:
        n = 0
        while self.expiry and self.expiry[0][0] <= now:
            _, sid = heapq.heappop(self.expiry)
            h = self.sessions.pop(sid, None)
            if h is None:
                continue
            self.reg.unregister(h)
            n += 1
        return n

    def offer(self, sid: str, tokens: int) -> bool:
        """Gives a fresh handle to the first hook that wants it; a hook that answers True owns it."""
        h = self.reg.register(tokens)  # clean: near miss, unregistered unless a hook took it
        if h is None:
            return False
        for hook in self.hooks:
            if hook(sid, h):
                return True
        self.reg.unregister(h)
        return False

    def turn(self, sid: str, tokens: int, fn: Callable[[KVHandle], int]) -> int:
        """A known session's handle is used as it is; otherwise one is taken for this turn alone."""
        h = self.sessions.get(sid)
        temporary = h is None
        if temporary:
            h = self.reg.register(tokens)  # clean: near miss, unregistered under the temporary flag
            if h is None:
                return -1
        try:
            return fn(h)
        finally:
            if temporary:
                self.reg.unregister(h)

    def turn_logged(self, sid: str, tokens: int, log: List[str]) -> int:
        h = self.sessions.get(sid)
        temporary = h is None
        if h is None:
            h = self.reg.register(tokens)  # leak: the flag is cleared for short turns and nobody unregisters
            if h is None:
                return -1
        if tokens < 4:
            temporary = False
            log.append(f"short turn {sid}")
        used = min(tokens, h.tokens)
        if temporary:
            self.reg.unregister(h)
        return used

    def probe(self, tokens: int, log: List[str]) -> int:
        def note(h: KVHandle) -> int:
            log.append(str(h.hid))
            return h.tokens
        return with_handle(self.reg, tokens, note)

    def import_session(self, sid: str, blob: str) -> bool:
        h = self.reg.register(len(blob))  # leak: the caught ValueError answers False with the handle registered
        if h is None:
            return False
        try:
            h.tokens = int(blob)
        except ValueError:
            return False
        self.close_session(sid)
        self.sessions[sid] = h
        return True


def main() -> None:
    reg = HandleRegistry(4)
    store = SessionStore(reg)
    log: List[str] = []
    assert store.open_session("a", 10, now=0.0)
    store.turn("a", 5, lambda h: h.tokens)
    store.turn("b", 5, lambda h: h.tokens)
    store.turn_logged("b", 5, log)
    store.probe(3, log)
    store.offer("c", 3)
    store.import_session("d", "12")
    assert store.expire(100.0) == 1
    store.close_session("d")
    assert not reg.open


if __name__ == "__main__":
    main()
