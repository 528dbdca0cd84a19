"""Handlers of the edge node, on top of the object cache."""
from typing import Callable, Dict, List, Optional, Tuple

from .objects import Entry, ObjectCache, Variants


class Response:
    """A body that is sent later; done() ends the pin of its entry."""

    def __init__(self, cache: ObjectCache, entry: Optional[Entry], status: int) -> None:
        self.cache = cache
        self.entry = entry
        self.status = status

    def body(self) -> bytes:
        return self.entry.body if self.entry is not None else b""

    def done(self) -> None:
        entry, self.entry = self.entry, None
        if entry is not None:
            self.cache.unpin(entry)


class Front:
    def __init__(self, cache: ObjectCache, send: Callable[[int, bytes], bool]) -> None:
        self.cache = cache
        self.variants = Variants(cache)
        self.send = send
        self.slow: Dict[int, Response] = {}
        self.hits = 0

    def respond(self, key: str, gzip: bool, if_none: str) -> Response:
        entry = self.variants.choose(key, gzip)  # leak: a matching tag answers 304 and forgets the pin
        if entry is None:
            return Response(self.cache, None, 404)
        if entry.etag == if_none:
            return Response(self.cache, None, 304)
        self.hits += 1
        return Response(self.cache, entry, 200)

    def handle(self, key: str, gzip: bool) -> bool:
        res = self.respond(key, gzip, "")  # clean: done() after the send
        ok = self.send(res.status, res.body())
        res.done()
        return ok

    def handle_slow(self, conn: int, key: str) -> None:
        old = self.slow.pop(conn, None)
        if old is not None:
            old.done()
        self.slow[conn] = self.respond(key, False, "")  # clean: near miss, drained by writable()

    def writable(self, conn: int) -> bool:
        res = self.slow.pop(conn, None)
        if res is None:
            return False
        ok = self.send(res.status, res.body())
        res.done()
        return ok

    def head(self, key: str, gzip: bool) -> Tuple[int, int]:
        res = self.respond(key, gzip, "")  # leak: the response is dropped without done()
        return res.status, len(res.body())

    def ranges(self, key: str, spans: List[Tuple[int, int]]) -> int:
        entry = self.variants.choose(key, False)  # clean: break and end both come to the unpin
        if entry is None:
            return 0
        sent = 0
        for a, b in spans:
            if b > len(entry.body) or not self.send(206, entry.body[a:b]):
                break
            sent += b - a
        self.cache.unpin(entry)
        return sent
