"""CUDA graph capture cache: one private memory pool per batch-size bucket, shared static inputs, side streams."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import torch


@dataclass
class StaticIO:
    ids: torch.Tensor
    pos: torch.Tensor
    bucket: int


class StreamPool:
    def __init__(self, n: int) -> None:
        self._streams = [torch.cuda.Stream() for _ in range(n)]

    def borrow(self) -> torch.cuda.Stream | None:
        return self._streams.pop() if self._streams else None

    def hand_back(self, s: torch.cuda.Stream) -> None:
        self._streams.append(s)


class MempoolTable:
    """torch.cuda.graph_pool_handle() ids with a count, a pool id may serve a few graphs."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._uses: dict[Any, int] = {}

    def create(self) -> Any | None:
        if len(self._uses) >= self.limit:
            return None
        h = torch.cuda.graph_pool_handle()
        self._uses[h] = 1
        return h

    def retain(self, h: Any) -> Any:
        self._uses[h] += 1
        return h

    def drop(self, h: Any) -> None:
        self._uses[h] -= 1
        if not self._uses[h]:
            del self._uses[h]


class StaticInputs:
    def __init__(self, buckets: list[int], per_bucket: int, device: str = "cuda") -> None:
        self._by: dict[int, list[StaticIO]] = {
            b: [
                StaticIO(torch.zeros(b, dtype=torch.long, device=device), torch.zeros(b, dtype=torch.long, device=device), b)
                for _ in range(per_bucket)
            ]
            for b in buckets
        }

    def bucket_for(self, n: int) -> int | None:
        return min((b for b in self._by if b >= n), default=None)

    def lend(self, n: int) -> StaticIO | None:
        b = self.bucket_for(n)
        if b is None or not self._by[b]:
            return None
        return self._by[b].pop()

    def reclaim(self, io: StaticIO) -> None:
        self._by[io.bucket].append(io)


@dataclass
class Captured:
    graph: torch.cuda.CUDAGraph
    io: StaticIO
    pool: Any
    out: torch.Tensor


class GraphRunner:
    def __init__(self, model: Callable[..., torch.Tensor], inputs: StaticInputs, pools: MempoolTable, streams: StreamPool) -> None:
        self.model = model
        self.inputs = inputs
        self.pools = pools
        self.streams = streams
        self._graphs: dict[int, Captured] = {}
        self._prefill: dict[int, Captured] = {}

    def _warmup(self, io: StaticIO, iters: int) -> bool:
        s = self.streams.borrow()  # clean: near miss, handed back after the loop, the break included
        if s is None:
            return False
        s.wait_stream(torch.cuda.current_stream())
        ok = True
        with torch.cuda.stream(s):
            for _ in range(iters):
                y = self.model(io.ids, io.pos)
                if not torch.isfinite(y).all():
                    ok = False
                    break
        torch.cuda.current_stream().wait_stream(s)
        self.streams.hand_back(s)
        return ok

    def _capture(self, io: StaticIO, pool: Any) -> Captured:
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, pool=pool):
            out = self.model(io.ids, io.pos)
        return Captured(g, io, pool, out)

    def capture_decode(self, bs: int) -> bool:
        if bs in self._graphs:
            return True
        io = self.inputs.lend(bs)  # clean: near miss, reclaimed on both failing branches, otherwise it lives with the graph
        if io is None:
            return False
        if not self._warmup(io, 2):
            self.inputs.reclaim(io)
            return False
        pool = self.pools.create()  # clean: near miss, kept in the captured record which reset drops
        if pool is None:
            self.inputs.reclaim(io)
            return False
        self._graphs[bs] = self._capture(io, pool)
        return True

    def capture_family(self, sizes: list[int]) -> int:
        base = self.pools.create()  # leak: each graph holds a reference of its own and the creator's is never dropped
        if base is None:
            return 0
        n = 0
        for bs in sorted(sizes, reverse=True):
            if bs in self._graphs:
                continue
            io = self.inputs.lend(bs)  # leak: inputs that fail the warm-up are not reclaimed before the continue
            if io is None:
                break
            if not self._warmup(io, 1):
                continue
            self._graphs[bs] = self._capture(io, self.pools.retain(base))  # clean: near miss, one reference per graph, dropped by reset
            n += 1
        return n

    def capture_prefill(self, ntok: int) -> bool:
        io = self.inputs.lend(ntok)  # clean: near miss, reclaimed without a pool, else with the graph when that is replaced or reset
        if io is None:
            return False
        old = self._prefill.pop(ntok, None)
        if old is not None:
            self._dismantle(old)
        pool = self.pools.create()  # leak: reset goes through the decode graphs and gives only the inputs of the prefill graphs back
        if pool is None:
            self.inputs.reclaim(io)
            return False
        self._prefill[ntok] = self._capture(io, pool)
        return True

    def _dismantle(self, c: Captured) -> None:
        c.graph.reset()
        self.inputs.reclaim(c.io)
        self.pools.drop(c.pool)

    def replay(self, ids: torch.Tensor, pos: torch.Tensor) -> torch.Tensor | None:
        n = ids.numel()
        c = self._graphs.get(self.inputs.bucket_for(n) or -1)
        if c is None:
            return None
        c.io.ids[:n].copy_(ids)
        c.io.pos[:n].copy_(pos)
        c.graph.replay()
        return c.out[:n]

    def eager(self, ids: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        io = self.inputs.lend(ids.numel())  # leak: the padded path returns a slice of the output and keeps the inputs
        if io is None:
            return self.model(ids, pos)
        n = ids.numel()
        io.ids[:n].copy_(ids)
        io.pos[:n].copy_(pos)
        out = self.model(io.ids, io.pos)
        if n < io.bucket:
            return out[:n]
        self.inputs.reclaim(io)
        return out

    def overlap_copy(self, src: torch.Tensor, dst: torch.Tensor) -> bool:
        s = self.streams.borrow()  # leak: an empty copy returns with the side stream
        if s is None or src.numel() == 0:
            return False
        with torch.cuda.stream(s):
            dst.copy_(src, non_blocking=True)
        torch.cuda.current_stream().wait_stream(s)
        self.streams.hand_back(s)
        return True

    def reset(self) -> None:
        while self._graphs:
            _, c = self._graphs.popitem()
            self._dismantle(c)
        for c in self._prefill.values():
            c.graph.reset()
            self.inputs.reclaim(c.io)
        self._prefill.clear()
