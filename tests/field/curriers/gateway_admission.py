"""Admission control in front of the HTTP gateway's model routes."""
from __future__ import annotations

import collections
import logging
import time
from dataclasses import dataclass
from typing import Callable, Deque, Dict, List, Optional, Tuple

log = logging.getLogger("gateway.admission")


class UpstreamError(RuntimeError):
    pass


class PermitPool:
    """A fixed number of in-flight permits for one traffic class."""

    def __init__(self, limit: int) -> None:
        self._free: List[int] = list(range(limit))
        self._held: set = set()

    def take(self) -> Optional[int]:
        if not self._free:
            return None
        permit = self._free.pop()
        self._held.add(permit)
        return permit

    def give(self, permit: int) -> None:
        self._held.remove(permit)
        self._free.append(permit)

    @property
    def in_flight(self) -> int:
        return len(self._held)


@dataclass
class HttpRequest:
    path: str
    body: dict
    deadline: float = float("inf")
    permit: Optional[int] = None


@dataclass
class HttpResponse:
    status: int
    body: object = None


class Gateway:
    def __init__(self, limit: int, upstream: Callable[[HttpRequest], object]) -> None:
        self.permits = PermitPool(limit)
        self.upstream = upstream
        self.waiting: Deque[HttpRequest] = collections.deque()
        self.stats: Dict[str, int] = collections.Counter()

    def completions(self, req: HttpRequest) -> HttpResponse:
        permit = self.permits.take()  # leak: the 400 for an empty prompt returns before the try
        if permit is None:
            return HttpResponse(429)
        if not req.body.get("prompt"):
            return HttpResponse(400, "prompt is required")
        try:
            return HttpResponse(200, self.upstream(req))
        finally:
            self.permits.give(permit)

    def embeddings(self, req: HttpRequest) -> HttpResponse:
        permit = self.permits.take()  # clean: near miss, the 400 is inside the try with the finally
        if permit is None:
            return HttpResponse(429)
        try:
            if not req.body.get("input"):
                return HttpResponse(400, "input is required")
            return HttpResponse(200, self.upstream(req))
        finally:
            self.permits.give(permit)

    def forward_with_retry(self, req: HttpRequest, attempts: int = 3) -> HttpResponse:
        for attempt in range(attempts):
            permit = self.permits.take()  # leak: a failed attempt continues without giving its permit back
            if permit is None:
                time.sleep(0.001 * (attempt + 1))
                continue
            try:
                out = self.upstream(req)
            except UpstreamError as exc:
                log.warning("attempt %d failed: %s", attempt, exc)
                continue
            self.permits.give(permit)
            return HttpResponse(200, out)
        return HttpResponse(503)

    def forward_idempotent(self, req: HttpRequest, attempts: int = 3) -> HttpResponse:
        permit = None
        for attempt in range(attempts):
            if permit is None:
                permit = self.permits.take()  # clean: near miss, one permit is kept across the attempts and given after the loop
            if permit is None:
                continue
            try:
                out = self.upstream(req)
            except UpstreamError:
                continue
            self.permits.give(permit)
            return HttpResponse(200, out)
        if permit is not None:
            self.permits.give(permit)
        return HttpResponse(503)

    def hedged(self, req: HttpRequest) -> HttpResponse:
        first = self.permits.take()  # leak: lost when there is no second permit
        if first is None:
            return HttpResponse(429)
        second = self.permits.take()  # clean: given in the finally
        if second is None:
            return HttpResponse(429)
        try:
            return HttpResponse(200, self.upstream(req) or self.upstream(req))
        finally:
            self.permits.give(second)
            self.permits.give(first)

    def enqueue_all(self, reqs: List[HttpRequest], now: float) -> List[HttpRequest]:
        rejected = []
        for req in reqs:
            permit = self.permits.take()  # leak: an expired request is rejected with the permit still out
            if permit is None:
                rejected.append(req)
                continue
            if req.deadline < now:
                self.stats["expired"] += 1
                rejected.append(req)
                continue
            req.permit = permit
            self.waiting.append(req)
        return rejected

    def run_batch(self, reqs: List[HttpRequest]) -> List[object]:
        admitted: List[Tuple[HttpRequest, int]] = []
        for req in reqs:
            permit = self.permits.take()  # clean: each pair in the list is given back in the second loop
            if permit is None:
                break
            admitted.append((req, permit))
        outs = []
        for req, permit in admitted:
            try:
                outs.append(self.upstream(req))
            except UpstreamError:
                outs.append(None)
            finally:
                self.permits.give(permit)
        return outs

    def step(self) -> Optional[object]:
        if not self.waiting:
            return None
        req = self.waiting.popleft()
        try:
            return self.upstream(req)
        finally:
            if req.permit is not None:
                self.permits.give(req.permit)
                req.permit = None

    def rerank(self, req: HttpRequest, permit: Optional[int] = None) -> HttpResponse:
        owned = permit is None
        if owned:
            permit = self.permits.take()  # clean: near miss, the same flag guards take and give
            if permit is None:
                return HttpResponse(429)
        out = self.upstream(req)
        if owned:
            self.permits.give(permit)
        return HttpResponse(200, out)

    def moderate(self, req: HttpRequest, permit: Optional[int] = None) -> HttpResponse:
        owned = permit is None
        if owned:
            permit = self.permits.take()  # leak: a flagged verdict returns past the give
            if permit is None:
                return HttpResponse(429)
        verdict = self.upstream(req)
        if verdict == "flagged":
            self.stats["flagged"] += 1
            return HttpResponse(451)
        if owned:
            self.permits.give(permit)
        return HttpResponse(200, verdict)


def warm_up(gateway: Gateway, n: int) -> int:
    """Drive n synthetic requests through the permit path."""
    done = 0
    while done < n:
        permit = gateway.permits.take()  # clean: given in each turn before the break test
        if permit is None:
            break
        gateway.permits.give(permit)
        done += 1
        if gateway.permits.in_flight:
            break
    return done


if __name__ == "__main__":
    gw = Gateway(4, lambda r: r.path)
    print(gw.completions(HttpRequest("/v1", {"prompt": "x"})), gw.rerank(HttpRequest("/r", {})))
    print(gw.embeddings(HttpRequest("/e", {})), gw.forward_with_retry(HttpRequest("/f", {})))
    gw.enqueue_all([HttpRequest("/q", {})], 0.0)
    print(gw.step(), gw.run_batch([HttpRequest("/b", {})]), warm_up(gw, 3), gw.permits.in_flight)
