"""CUDA graph capture and replay for decode batches, with shared static inputs."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Dict, List, Optional

import torch


class StreamPool:
    def __init__(self, n: int):
        self._streams = [torch.cuda.Stream() for _ in range(n)]

    def checkout(self) -> Optional[torch.cuda.Stream]:
        return self._streams.pop() if self._streams else None

    def checkin(self, stream: torch.cuda.Stream) -> None:
        self._streams.append(stream)


class StaticArena:
    """Carves ranges of token positions from one static input tensor."""

    def __init__(self, max_tokens: int):
        self.tokens = torch.zeros(max_tokens, dtype=torch.long, device="cuda")
        self._holes: List[tuple[int, int]] = [(0, max_tokens)]

    def carve(self, n: int) -> Optional["Span"]:
        for i, (lo, hi) in enumerate(self._holes):
            if hi - lo >= n:
                self._holes[i] = (lo + n, hi)
                return Span(lo, lo + n)
        return None

    def fill_in(self, span: "Span") -> None:
        self._holes.append((span.lo, span.hi))


class MempoolBook:
    def __init__(self) -> None:
        self._users: Dict[int, int] = {}
        self._handles: Dict[int, object] = {}

    def join(self, key: int) -> object:
        if key not in self._handles:
            self._handles[key] = torch.cuda.graph_pool_handle()
        self._users[key] = self._users.get(key, 0) + 1
        return self._handles[key]

    def leave(self, key: int) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key], self._handles[key]


@dataclass
class Span:
    lo: int
    hi: int


@dataclass
class Captured:
    graph: torch.cuda.CUDAGraph
    span: Span
    pool_key: int
    out: torch.Tensor


class GraphRunner:
    def __init__(self, model: Callable[[torch.Tensor], torch.Tensor], arena: StaticArena, streams: StreamPool,
                 pools: MempoolBook):
        self.model = model
        self.arena = arena
        self.streams = streams
        self.pools = pools
        self.graphs: Dict[int, Captured] = {}
        self.comm_stream: Optional[torch.cuda.Stream] = None

    def capture(self, bs: int, pool_key: int = 0) -> bool:
        if bs in self.graphs:
            return True
        span = self.arena.carve(bs)  # clean: near miss, filled in again without a stream or upon failure, else owned by Captured
        if span is None:
            return False
        stream = self.streams.checkout()  # clean: near miss, finally checks it in for the failing capture too
        if stream is None:
            self.arena.fill_in(span)
            return False
        handle = self.pools.join(pool_key)  # leak: a failed capture fills in the span but never leaves the pool
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=handle, stream=stream):
                out = self.model(self.arena.tokens[span.lo:span.hi])
        except RuntimeError:
            self.arena.fill_in(span)
            return False
        finally:
            self.streams.checkin(stream)
        self.graphs[bs] = Captured(graph, span, pool_key, out)
        return True

    def discard(self, bs: int) -> None:
        cap = self.graphs.pop(bs, None)
        if cap is None:
            return
        self.arena.fill_in(cap.span)
        self.pools.leave(cap.pool_key)

    def recapture(self, bs: int) -> bool:
        cap = self.graphs.get(bs)
        span = self.arena.carve(bs)  # leak: the span of the graph captured before is replaced and not filled in
        if span is None or cap is None:
            if span is not None:
                self.arena.fill_in(span)
            return False
        cap.graph.reset()
        cap.span = span
        return True

    def move(self, bs: int) -> bool:
        cap = self.graphs[bs]
        span = self.arena.carve(bs)  # clean: near miss, the old span is filled in before the swap
        if span is None:
            return False
        self.arena.tokens[span.lo:span.hi].copy_(self.arena.tokens[cap.span.lo:cap.span.hi])
        self.arena.fill_in(cap.span)
        cap.span = span
        return True

    def repool(self, bs: int, pool_key: int) -> None:
        cap = self.graphs[bs]
        self.pools.join(pool_key)  # clean: near miss, discard leaves cap.pool_key, the former one is left here
        self.pools.leave(cap.pool_key)
        cap.pool_key = pool_key

    def share_pool(self, sizes: List[int], pool_key: int) -> object:
        handle: object = None
        for bs in sizes:
            handle = self.pools.join(pool_key)  # leak: sizes captured already join the pool and no graph will leave it
            if bs in self.graphs:
                continue
            if not self.capture(bs, pool_key):
                self.pools.leave(pool_key)
                break
            self.pools.leave(pool_key)
        return handle

    def replay(self, tokens: torch.Tensor) -> Optional[torch.Tensor]:
        cap = self.graphs.get(tokens.numel())
        if cap is None:
            return self._eager(tokens)
        self.arena.tokens[cap.span.lo:cap.span.hi].copy_(tokens)
        cap.graph.replay()
        return cap.out

    def _eager(self, tokens: torch.Tensor) -> Optional[torch.Tensor]:
        stream = self.streams.checkout()  # leak: an empty batch returns before the stream is checked in
        if stream is None:
            return self.model(tokens)
        if tokens.numel() == 0:
            return None
        with torch.cuda.stream(stream):
            out = self.model(tokens)
        stream.synchronize()
        self.streams.checkin(stream)
        return out

    def overlap(self, fns: List[Callable[[], None]]) -> int:
        used: List[torch.cuda.Stream] = []
        for fn in fns:
            stream = self.streams.checkout()  # clean: near miss, all in used are checked in after the loop
            if stream is None:
                fn()
                continue
            used.append(stream)
            with torch.cuda.stream(stream):
                fn()
        torch.cuda.synchronize()
        for stream in used:
            self.streams.checkin(stream)
        return len(used)

    def set_comm(self, enabled: bool) -> None:
        if enabled and self.comm_stream is None:
            self.comm_stream = self.streams.checkout()  # clean: near miss, guarded by None and checked in when disabled
        elif not enabled and self.comm_stream is not None:
            self.streams.checkin(self.comm_stream)
            self.comm_stream = None

    def fits(self, sizes: List[int]) -> bool:
        spans: List[Span] = []
        for bs in sizes:
            span = self.arena.carve(bs)  # leak: a size that does not fit returns with the spans before it carved
            if span is None:
                return False
            spans.append(span)
        for span in spans:
            self.arena.fill_in(span)
        return True
