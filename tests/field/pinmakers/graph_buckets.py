"""CUDA graph replay for decode, with static inputs taken from bucketed slabs.

Slabs are sized by batch bucket; a captured graph keeps its slabs until it is evicted.
"""
from __future__ import annotations

import bisect
import heapq
import logging
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import torch

logger = logging.getLogger("graph_buckets")


class Slab(NamedTuple):
    index: int
    bucket: int
    data: torch.Tensor


class SlabBank:
    """Lowest-index-first slabs per bucket (a heap keeps addresses stable between captures)."""

    BUCKETS = (1, 2, 4, 8, 16, 32, 64)

    def __init__(self, hidden: int, per_bucket: int, device: str = "cuda"):
        self._slabs: Dict[int, List[torch.Tensor]] = {
            b: [torch.zeros(b, hidden, device=device) for _ in range(per_bucket)] for b in self.BUCKETS
        }
        self._heaps = {b: list(range(per_bucket)) for b in self.BUCKETS}

    def round_up(self, n: int) -> int:
        i = bisect.bisect_left(self.BUCKETS, n)
        if i == len(self.BUCKETS):
            raise ValueError(f"batch {n} is over the largest bucket")
        return self.BUCKETS[i]

    def claim(self, n: int) -> Optional[Slab]:
        bucket = self.round_up(n)
        heap = self._heaps[bucket]
        if not heap:
            return None
        index = heapq.heappop(heap)
        return Slab(index, bucket, self._slabs[bucket][index])

    def claim_clean(self, n: int) -> Optional[Slab]:
        """Like claim, but never a slab that holds non-finite values from an earlier replay."""
        bucket = self.round_up(n)
        heap = self._heaps[bucket]
        while heap:
            index = heapq.heappop(heap)  # leak: an index whose slab is not finite is popped and never pushed back
            data = self._slabs[bucket][index]
            if not torch.isfinite(data).all():
                continue
            return Slab(index, bucket, data)
        return None

    def claim_last(self, n: int) -> Optional[Slab]:
        bucket = self.round_up(n)
        heap = self._heaps[bucket]
        popped: List[int] = []
        while heap:
            popped.append(heapq.heappop(heap))  # clean: near miss, all but the one handed out are pushed back
        if not popped:
            return None
        index = popped.pop()
        for i in popped:
            heapq.heappush(heap, i)
        return Slab(index, bucket, self._slabs[bucket][index])

    def disclaim(self, slab: Slab) -> None:
        heapq.heappush(self._heaps[slab.bucket], slab.index)


class Captured:
    def __init__(self, graph: Any, inp: Slab, out: Slab):
        self.graph = graph
        self.inp = inp
        self.out = out
        self.hits = 0

    def replay(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        self.inp.data[:n].copy_(x)
        self.graph.replay()
        self.hits += 1
        return self.out.data[:n].clone()


class GraphRunner:
    def __init__(self, model: Callable[[torch.Tensor], torch.Tensor], bank: SlabBank, max_graphs: int = 8):
        self.model = model
        self.bank = bank
        self.max_graphs = max_graphs
        self.graphs: Dict[int, Captured] = {}
        self.eager: Dict[int, int] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def _record(self, inp: Slab, out: Slab) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            out.data.copy_(self.model(inp.data))
        return graph

    def capture(self, n: int) -> Optional[Captured]:
        inp = self.bank.claim(n)  # clean: near miss, given back when out is None, otherwise kept in the entry
        if inp is None:
            return None
        out = self.bank.claim(n)  # clean: kept in the entry, evict() gives it back
        if out is None:
            self.bank.disclaim(inp)
            return None
        try:
            graph = self._record(inp, out)
        except RuntimeError:
            self.bank.disclaim(out)
            self.bank.disclaim(inp)
            raise
        entry = Captured(graph, inp, out)
        self._evict_bucket(inp.bucket)
        self.graphs[inp.bucket] = entry
        return entry

    def capture_quietly(self, n: int) -> Optional[Captured]:
        inp = self.bank.claim(n)  # leak: a failed capture gives back out only
        if inp is None:
            return None
        out = self.bank.claim(n)  # clean: given back when the capture fails, else kept in the entry
        if out is None:
            self.bank.disclaim(inp)
            return None
        try:
            graph = self._record(inp, out)
        except RuntimeError as exc:
            logger.warning("capture of %d failed: %s", n, exc)
            self.bank.disclaim(out)
            return None
        self._evict_bucket(inp.bucket)
        self.graphs[inp.bucket] = Captured(graph, inp, out)
        return self.graphs[inp.bucket]

    def _evict_bucket(self, bucket: int) -> None:
        old = self.graphs.pop(bucket, None)
        if old is not None:
            self.bank.disclaim(old.inp)
            self.bank.disclaim(old.out)

    def recapture_all(self) -> None:
        for bucket in list(self.graphs):
            inp = self.bank.claim_clean(bucket)  # leak: breaks out with it when out is None
            out = self.bank.claim_clean(bucket) if inp is not None else None  # clean: kept in the new entry
            if out is None:
                break
            try:
                graph = self._record(inp, out)
            except RuntimeError:
                self.bank.disclaim(inp)
                self.bank.disclaim(out)
                raise
            self._evict_bucket(bucket)
            self.graphs[bucket] = Captured(graph, inp, out)

    def shrink(self, keep: int) -> None:
        by_hits = sorted(self.graphs, key=lambda b: self.graphs[b].hits)
        while len(by_hits) > keep:
            self._evict_bucket(by_hits.pop(0))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        bucket = self.bank.round_up(x.shape[0])
        entry = self.graphs.get(bucket)
        if entry is None and self.eager.get(bucket, 0) >= 2:
            self.shrink(self.max_graphs - 1)
            entry = self.capture(x.shape[0])  # clean: the runner's table owns the entry
        if entry is None:
            self.eager[bucket] = self.eager.get(bucket, 0) + 1
            return self.model(x)
        return entry.replay(x)

    def close(self) -> None:
        self.shrink(0)


def padded_eager(bank: SlabBank, model, x: torch.Tensor) -> torch.Tensor:
    slab = bank.claim(x.shape[0])  # clean: given back in finally
    if slab is None:
        return model(x)
    try:
        slab.data.zero_()
        slab.data[: x.shape[0]].copy_(x)
        return model(slab.data)[: x.shape[0]].clone()
    finally:
        bank.disclaim(slab)


def timed_buckets(bank: SlabBank, model, repeats: int) -> Dict[int, float]:
    times: Dict[int, float] = {}
    for bucket in bank.BUCKETS:
        slab = bank.claim(bucket)  # leak: a model that cannot run the bucket breaks out before disclaim
        if slab is None:
            continue
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        try:
            for _ in range(repeats):
                model(slab.data)
        except torch.cuda.OutOfMemoryError:
            logger.info("bucket %d does not fit", bucket)
            break
        stop.record()
        stop.synchronize()
        times[bucket] = start.elapsed_time(stop) / repeats
        bank.disclaim(slab)
    return times


def bench_copy(bank: SlabBank, sizes: List[int]) -> Dict[int, int]:
    done: Dict[int, int] = {}
    slab: Optional[Slab] = None
    for n in sizes:
        if slab is not None and slab.bucket != bank.round_up(n):
            bank.disclaim(slab)
            slab = None
        if slab is None:
            slab = bank.claim(n)  # clean: near miss, given back on a change of bucket and after the loop
            if slab is None:
                continue
        slab.data.fill_(float(n))
        done[n] = slab.bucket
    if slab is not None:
        bank.disclaim(slab)
    return done


def pick_widest(bank: SlabBank, sizes: List[int]) -> Optional[Slab]:
    best: Optional[Slab] = None
    for n in sizes:
        slab = bank.claim(n)  # leak: a narrower slab replaced as best is dropped
        if slab is None:
            continue
        if best is None or slab.bucket > best.bucket:
            best = slab
        else:
            bank.disclaim(slab)
    return best
