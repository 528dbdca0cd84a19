"""Page bitmap over one pinned region, and the copy engine that stages through it."""
from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from typing import Deque, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch

PAGE = 64 * 1024


class Span(NamedTuple):
    start: int
    pages: int


class PinnedRegion:
    """First-fit spans of pages. carve() returns None when no run is long enough."""

    def __init__(self, total_pages: int) -> None:
        self.total = total_pages
        self.mem = torch.empty(total_pages * PAGE, dtype=torch.uint8, pin_memory=True)
        self._bits = bytearray(total_pages)
        self.staged_bytes = 0

    def carve(self, nbytes: int) -> Optional[Span]:
        want = -(-nbytes // PAGE)
        run = 0
        for i in range(self.total):
            run = 0 if self._bits[i] else run + 1
            if run == want:
                first = i - want + 1
                for j in range(first, i + 1):
                    self._bits[j] = 1
                return Span(first, want)
        return None

    def mend(self, span: Span) -> None:
        for j in range(span.start, span.start + span.pages):
            self._bits[j] = 0

    def carve_two(self, a: int, b: int) -> Optional[Tuple[Span, Span]]:
        first = self.carve(a)  # clean: returned in the pair or mended when there is no second
        if first is None:
            return None
        second = self.carve(b)  # clean: returned in the pair
        if second is None:
            self.mend(first)
            return None
        return first, second

    def regrow(self, span: Span, nbytes: int) -> Optional[Span]:
        """Replace span by a larger one; span stays valid when None is returned."""
        bigger = self.carve(nbytes)  # clean: returned to the caller
        if bigger is None:
            return None
        n = span.pages * PAGE
        self.view(bigger, n).copy_(self.view(span, n))
        self.mend(span)
        return bigger

    def view(self, span: Span, nbytes: int) -> torch.Tensor:
        off = span.start * PAGE
        return self.mem[off:off + nbytes]

    @contextmanager
    def span(self, nbytes: int) -> Iterator[torch.Tensor]:
        s = self.carve(nbytes)  # clean: mended in finally
        if s is None:
            raise MemoryError(nbytes)
        try:
            yield self.view(s, nbytes)
        finally:
            self.mend(s)

    @contextmanager
    def maybe_span(self, nbytes: int) -> Iterator[Optional[torch.Tensor]]:
        s = self.carve(nbytes)  # leak: not mended when the body left the span empty
        if s is None:
            yield None
            return
        stage = self.view(s, nbytes).zero_()
        try:
            yield stage
        finally:
            self.staged_bytes += nbytes
        if not stage.any():
            return
        self.mend(s)


class CopyEngine:
    def __init__(self, region: PinnedRegion, depth: int = 8) -> None:
        self.region = region
        self.stream = torch.cuda.Stream()
        self.depth = depth
        self._flying: Deque[Tuple[torch.cuda.Event, Span]] = deque()
        self._named: Dict[str, Span] = {}

    def upload(self, host: torch.Tensor, dev: torch.Tensor) -> bool:
        n = host.numel() * host.element_size()
        span = self.region.carve(n)  # clean: near miss, moved into _flying, which _reap() mends
        if span is None:
            dev.copy_(host)
            return False
        stage = self.region.view(span, n)
        stage.copy_(host.view(torch.uint8).view(-1))
        with torch.cuda.stream(self.stream):
            dev.view(torch.uint8).view(-1).copy_(stage, non_blocking=True)
            ev = torch.cuda.Event()
            ev.record()
        self._flying.append((ev, span))
        if len(self._flying) > self.depth:
            self._reap(block=True)
        return True

    def _reap(self, block: bool) -> None:
        while self._flying:
            ev, span = self._flying[0]
            if not ev.query():
                if not block:
                    return
                ev.synchronize()
            self._flying.popleft()
            self.region.mend(span)

    def download(self, dev: torch.Tensor) -> torch.Tensor:
        n = dev.numel() * dev.element_size()
        out = torch.empty(dev.shape, dtype=dev.dtype)
        with self.region.span(n) as stage:  # clean: the with statement mends it
            stage.copy_(dev.view(torch.uint8).view(-1))
            out.view(torch.uint8).view(-1).copy_(stage)
        return out

    def download_many(self, devs: List[torch.Tensor]) -> List[torch.Tensor]:
        outs = []
        for d in devs:
            n = d.numel() * d.element_size()
            span = self.region.carve(n)  # leak: not mended for a tensor with nothing finite in it
            if span is None:
                outs.append(d.cpu())
                continue
            stage = self.region.view(span, n)
            stage.copy_(d.view(torch.uint8).view(-1))
            host = stage.view(d.dtype).view(d.shape)
            if not torch.isfinite(host).any():
                outs.append(torch.zeros_like(host))
                continue
            outs.append(host.clone())
            self.region.mend(span)
        return outs

    def measure(self, a: int, b: int) -> float:
        pair = self.region.carve_two(a, b)  # leak: only the first of the pair is mended
        if pair is None:
            return 0.0
        t0, t1 = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        t0.record()
        self.region.view(pair[1], b).cuda(non_blocking=True)
        t1.record()
        t1.synchronize()
        self.region.mend(pair[0])
        return b / t0.elapsed_time(t1)

    def collect(self, sources: Iterator[torch.Tensor], first: int) -> Optional[torch.Tensor]:
        used, cap = 0, first
        span = self.region.carve(first)  # leak: not mended when regrow() finds no room and None is returned
        if span is None:
            return None
        for src in sources:
            n = src.numel()
            if used + n > cap:
                cap = max(cap * 2, used + n)
                span = self.region.regrow(span, cap)  # leak: mended nowhere once a later regrow() gives None
                if span is None:
                    return None
            self.region.view(span, used + n)[used:].copy_(src)
            used += n
        out = self.region.view(span, used).clone()
        self.region.mend(span)
        return out

    def bind(self, name: str, nbytes: int) -> Optional[torch.Tensor]:
        old = self._named.pop(name, None)
        if old is not None:
            self.region.mend(old)
        span = self.region.carve(nbytes)  # clean: near miss, held by name, the old one is mended first, close() mends all
        if span is None:
            return None
        self._named[name] = span
        return self.region.view(span, nbytes)

    def resize(self, name: str, nbytes: int) -> bool:
        bigger = self.region.regrow(self._named[name], nbytes)  # clean: near miss, on None the table still holds the old one
        if bigger is None:
            return False
        self._named[name] = bigger
        return True

    def close(self) -> None:
        self._reap(block=True)
        for span in self._named.values():
            self.region.mend(span)
        self._named.clear()
