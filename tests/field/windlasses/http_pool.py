"""HTTP/1.1 keep-alive pool used by the reward-model clients."""
from __future__ import annotations

import dataclasses
import random
import threading
import time
import typing as t
from collections import defaultdict, deque

RETRYABLE = {429, 502, 503, 504}


@dataclasses.dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes


Transport = t.Callable[[str, str, bytes], "Reply | None"]


class Wire:
    """One keep-alive connection."""

    def __init__(self, origin: str, transport: Transport) -> None:
        self.origin = origin
        self.transport = transport
        self.dead = False

    def roundtrip(self, method: str, path: str, body: bytes = b"") -> Reply | None:
        return self.transport(method, self.origin + path, body)

    def chunks(self, path: str) -> t.Iterator[bytes]:
        reply = self.roundtrip("GET", path)
        if reply is not None:
            yield from reply.body.splitlines()


class WirePool:
    def __init__(self, per_origin: int, transport: Transport) -> None:
        self.per_origin = per_origin
        self.transport = transport
        self._parked: dict[str, deque[Wire]] = defaultdict(deque)
        self._live: dict[str, int] = defaultdict(int)
        self._cv = threading.Condition()

    def lease(self, origin: str, wait: float = 1.0) -> Wire | None:
        end = time.monotonic() + wait
        with self._cv:
            while True:
                if self._parked[origin]:
                    return self._parked[origin].popleft()  # clean: returned to the caller
                if self._live[origin] < self.per_origin:
                    self._live[origin] += 1
                    return Wire(origin, self.transport)
                left = end - time.monotonic()
                if left <= 0:
                    return None
                self._cv.wait(left)

    def unlease(self, wire: Wire) -> None:
        with self._cv:
            if wire.dead:
                self._live[wire.origin] -= 1
            else:
                self._parked[wire.origin].append(wire)
            self._cv.notify()

    def trim(self, origin: str, keep: int) -> int:
        with self._cv:
            n = 0
            while len(self._parked[origin]) > keep:
                self._parked[origin].pop()  # leak: the wire is thrown away but _live still counts it
                n += 1
            return n


class Balancer:
    """Wrapper over WirePool: chooses an origin, and an in-flight slot with it."""

    def __init__(self, pool: WirePool, origins: list[str], slots: int) -> None:
        self.pool = pool
        self.origins = origins
        self.slots = threading.BoundedSemaphore(slots)

    def pick(self) -> Wire | None:
        if not self.slots.acquire(timeout=1.0):  # clean: released when no wire is found, else put() releases
            return None
        for origin in random.sample(self.origins, len(self.origins)):
            wire = self.pool.lease(origin, 0)  # clean: returned to the caller
            if wire is not None:
                return wire
        self.slots.release()
        return None

    def pick_from(self, origin: str) -> Wire | None:
        self.slots.acquire()  # leak: no release when the origin has no wire to give
        return self.pool.lease(origin)  # clean: returned to the caller

    def put(self, wire: Wire) -> None:
        self.pool.unlease(wire)
        self.slots.release()


class Response:
    """Body is read lazily; the wire goes back in close()."""

    def __init__(self, balancer: Balancer, wire: Wire, reply: Reply) -> None:
        self._balancer = balancer
        self._wire: Wire | None = wire
        self.reply = reply

    def json_body(self) -> bytes:
        return self.reply.body

    def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            self._balancer.put(wire)

    def __enter__(self) -> "Response":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class RewardClient:
    def __init__(self, balancer: Balancer, tries: int = 4) -> None:
        self.balancer = balancer
        self.tries = tries
        self.streams: dict[str, Response] = {}
        self.sticky: dict[str, Response] = {}

    def send(self, path: str, body: bytes) -> Response | None:
        """The caller closes the response."""
        wire = self.balancer.pick()  # clean: near miss, owned by the Response, or put back when there is no reply
        if wire is None:
            return None
        reply = wire.roundtrip("POST", path, body)
        if reply is None:
            wire.dead = True
            self.balancer.put(wire)
            return None
        return Response(self.balancer, wire, reply)

    def score(self, text: bytes) -> float | None:
        resp = self.send("/score", text)  # leak: a non-200 response is not closed
        if resp is None:
            return None
        if resp.reply.status != 200:
            return None
        value = float(resp.json_body() or b"0")
        resp.close()
        return value

    def score_retry(self, text: bytes) -> float | None:
        for n in range(self.tries):
            resp = self.send("/score", text)  # leak: a retryable status goes round the loop unclosed
            if resp is None:
                continue
            if resp.reply.status in RETRYABLE:
                time.sleep(min(2.0, 0.1 * 2 ** n))
                continue
            with resp:
                return float(resp.json_body() or b"0")
        return None

    def score_batch(self, texts: list[bytes]) -> list[float]:
        out: list[float] = []
        for text in texts:
            resp = self.send("/score", text)  # clean: near miss, the with block closes it ahead of the continue
            if resp is None:
                out.append(0.0)
                continue
            with resp:
                if resp.reply.status != 200:
                    out.append(0.0)
                    continue
                out.append(float(resp.json_body() or b"0"))
        return out

    def pinned(self, origin: str, text: bytes) -> bytes | None:
        wire = self.balancer.pick_from(origin)  # clean: put back by finally
        if wire is None:
            return None
        try:
            reply = wire.roundtrip("POST", "/score", text)
            wire.dead = reply is None
            return reply.body if reply else None
        finally:
            self.balancer.put(wire)

    # -- long-lived streams ----------------------------------------------------

    def open_stream(self, name: str) -> bool:
        resp = self.send(f"/stream/{name}", b"")  # leak: a second open of the same name replaces the stored response
        if resp is None:
            return False
        self.streams[name] = resp
        return True

    def ensure_stream(self, name: str) -> Response | None:
        if name not in self.sticky:
            resp = self.send(f"/stream/{name}", b"")  # clean: near miss, stored under an absent name, shutdown() closes it
            if resp is None:
                return None
            self.sticky[name] = resp
        return self.sticky[name]

    def shutdown(self) -> None:
        for table in (self.streams, self.sticky):
            while table:
                _, resp = table.popitem()
                resp.close()

    def tail(self, path: str, stop: t.Callable[[bytes], bool]) -> t.Iterator[bytes]:
        wire = self.balancer.pick()  # leak: the stop() return leaves the wire and its slot out
        if wire is None:
            return
        for chunk in wire.chunks(path):
            if stop(chunk):
                return
            yield chunk
        self.balancer.put(wire)


class Hedger:
    """Sends the same request on two wires and takes the first good answer."""

    def __init__(self, pool: WirePool, a: str, b: str) -> None:
        self.pool = pool
        self.a = a
        self.b = b

    def ask(self, path: str) -> Reply | None:
        first = self.pool.lease(self.a)  # leak: kept when the second origin gives no wire
        second = self.pool.lease(self.b)  # clean: given back with both, or alone when first is None
        if first is None:
            if second is not None:
                self.pool.unlease(second)
            return None
        if second is None:
            return first.roundtrip("GET", path)
        got = first.roundtrip("GET", path) or second.roundtrip("GET", path)
        self.pool.unlease(first)
        self.pool.unlease(second)
        return got
