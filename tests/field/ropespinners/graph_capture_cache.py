"""CUDA graph cache for decode: captured graphs own static inputs leased from a tensor pool with an LRU on top."""
import logging
import threading
from collections import OrderedDict, defaultdict
from typing import Callable, Dict, Iterable, List, Optional, Tuple

import torch

log = logging.getLogger("graphs")


class StaticPool:
    """Hands out tensors that must not move while a graph refers to them."""

    def __init__(self, device: str, cap: int):
        self.device = device
        self.cap = cap
        self.given = 0
        self._bins: Dict[Tuple, List[torch.Tensor]] = defaultdict(list)

    def obtain(self, shape, dtype=torch.float16) -> Optional[torch.Tensor]:
        if self.given >= self.cap:
            return None
        self.given += 1
        bin_ = self._bins[(tuple(shape), dtype)]
        if bin_:
            return bin_.pop()  # clean: returned to the caller
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def relinquish(self, t: torch.Tensor) -> None:
        self.given -= 1
        self._bins[(tuple(t.shape), t.dtype)].append(t)


class TrackedPool:
    """StaticPool that knows which graph asked; relinquish_all() by tag."""

    def __init__(self, inner: StaticPool):
        self.inner = inner
        self._by_tag: Dict[str, List[torch.Tensor]] = {}

    def obtain(self, tag: str, shape, dtype=torch.float16) -> Optional[torch.Tensor]:
        t = self.inner.obtain(shape, dtype)  # clean: near miss, kept under the tag, which relinquish_all() empties
        if t is not None:
            self._by_tag.setdefault(tag, []).append(t)
        return t

    def adopt(self, tag: str, shapes: Iterable) -> List[torch.Tensor]:
        ts = []
        for s in shapes:
            t = self.inner.obtain(s)  # leak: when a later shape fails, what ts holds is dropped with it
            if t is None:
                return []
            ts.append(t)
        self._by_tag.setdefault(tag, []).extend(ts)
        return ts

    def relinquish_all(self, tag: str) -> None:
        for t in self._by_tag.pop(tag, []):
            self.inner.relinquish(t)


class Captured:
    """A graph with its static input and output. Views of caller memory are not owned."""

    def __init__(self, pool: StaticPool, static_in: torch.Tensor, owns_in: bool):
        self.pool = pool
        self.static_in = static_in
        self.owns_in = owns_in
        self.static_out: Optional[torch.Tensor] = None
        self.graph = torch.cuda.CUDAGraph()

    def capture(self, model: Callable, shape) -> bool:
        self.static_out = self.pool.obtain(shape)  # clean: near miss, destroy() relinquishes whatever is set
        if self.static_out is None:
            return False
        with torch.cuda.graph(self.graph):
            self.static_out.copy_(model(self.static_in))
        return True

    def destroy(self) -> None:
        self.graph.reset()
        if self.static_out is not None:
            self.pool.relinquish(self.static_out)
            self.static_out = None
        if self.owns_in:
            self.pool.relinquish(self.static_in)
            self.owns_in = False


class GraphCache:
    def __init__(self, pool: StaticPool, model: Callable, keep: int, hidden: int):
        self.pool = pool
        self.model = model
        self.keep = keep
        self.hidden = hidden
        self._lru: "OrderedDict[int, Captured]" = OrderedDict()
        self._mu = threading.RLock()

    def lookup(self, batch: int) -> Optional[Captured]:
        with self._mu:
            g = self._lru.get(batch)
            if g is not None:
                self._lru.move_to_end(batch)
                return g
            x = self.pool.obtain((batch, self.hidden))  # clean: owned by the Captured, which destroy() frees
            if x is None:
                return None
            g = Captured(self.pool, x, owns_in=True)
            if not g.capture(self.model, (batch, self.hidden)):  # clean: destroyed on failure, else in the LRU
                g.destroy()
                return None
            self._lru[batch] = g
            if len(self._lru) > self.keep:
                _, old = self._lru.popitem(last=False)
                old.destroy()
            return g

    def lookup_shared(self, batch: int, x: torch.Tensor) -> Optional[Captured]:
        """Captures over the caller's tensor when it is aligned, over a copy when it is not."""
        aligned = x.data_ptr() % 256 == 0
        src = x
        if not aligned:
            src = self.pool.obtain(x.shape, x.dtype)  # leak: the Captured is told that it does not own the copy
            if src is None:
                return None
            src.copy_(x)
        g = Captured(self.pool, src, owns_in=False)
        if not g.capture(self.model, (batch, self.hidden)):  # clean: destroyed on failure, else returned to the caller
            g.destroy()
            return None
        return g

    def replay(self, x: torch.Tensor) -> torch.Tensor:
        g = self.lookup(x.shape[0])  # clean: stays in the LRU
        if g is None:
            return self.model(x)
        g.static_in.copy_(x)
        g.graph.replay()
        return g.static_out.clone()

    def invalidate(self, batches: Iterable[int]) -> None:
        with self._mu:
            for b in batches:
                g = self._lru.pop(b, None)
                if g is None:
                    continue
                if not torch.cuda.current_stream().query():
                    torch.cuda.current_stream().synchronize()
                g.destroy()

    def clear(self) -> None:
        with self._mu:
            while self._lru:
                _, g = self._lru.popitem()
                g.destroy()


def pad_batch(pool: StaticPool, x: torch.Tensor, to: int) -> torch.Tensor:
    """x itself when it is large enough, a pooled copy otherwise."""
    if x.shape[0] >= to:
        return x
    p = pool.obtain((to, x.shape[1]), x.dtype)  # clean: returned to the caller
    if p is None:
        return x
    p[: x.shape[0]].copy_(x)
    p[x.shape[0]:].zero_()
    return p


def replay_padded(cache: GraphCache, x: torch.Tensor, to: int) -> torch.Tensor:
    p = pad_batch(cache.pool, x, to)  # clean: near miss, relinquished unless it is x itself
    y = cache.replay(p)
    if p is not x:
        cache.pool.relinquish(p)
    return y[: x.shape[0]]


def logits_once(cache: GraphCache, head: Callable, x: torch.Tensor, to: int) -> torch.Tensor:
    return head(cache.replay(pad_batch(cache.pool, x, to)))[: x.shape[0]]  # leak: the padded copy is dropped after the replay


def measure(pool: StaticPool, model: Callable, sizes: List[int], hidden: int, budget_ms: float) -> Optional[int]:
    """Largest size within the budget."""
    fit = None
    for n in sorted(sizes):
        x = pool.obtain((n, hidden))  # leak: the first size over budget returns with x obtained
        if x is None:
            return fit
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        model(x)
        stop.record()
        stop.synchronize()
        if start.elapsed_time(stop) > budget_ms:
            return fit
        fit = n
        pool.relinquish(x)
    return fit
