"""Workspaces for split-KV decode kernels: a slab cut into 256-byte granules, with shared (counted) plans on top."""
import ctypes
import logging
import threading
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import torch

log = logging.getLogger(__name__)
GRANULE = 256


class Span(NamedTuple):
    start: int
    length: int


class Slab:
    """First-fit over a bitmap kept as a Python int; bit set = in use."""

    def __init__(self, granules: int, device):
        self.granules = granules
        self.mem = torch.empty(granules * GRANULE, dtype=torch.uint8, device=device)
        self._bits = 0
        self._mu = threading.Lock()

    def carve(self, nbytes: int) -> Optional[Span]:
        need = -(-nbytes // GRANULE)
        mask = (1 << need) - 1
        with self._mu:
            for at in range(0, self.granules - need + 1):
                if not (self._bits >> at) & mask:
                    self._bits |= mask << at
                    return Span(at, need)
        return None

    def restore(self, span: Span) -> None:
        with self._mu:
            self._bits &= ~(((1 << span.length) - 1) << span.start)

    def tensor(self, span: Span, dtype, shape) -> torch.Tensor:
        lo = span.start * GRANULE
        flat = self.mem[lo: lo + span.length * GRANULE].view(dtype)
        n = 1
        for d in shape:
            n *= d
        return flat[:n].view(shape)


class Workspace:
    """One kernel call's scratch: partial outputs, partial lse, and counters for the reduction."""

    def __init__(self, slab: Slab):
        self.slab = slab
        self.partial: Optional[Span] = None
        self.lse: Optional[Span] = None
        self.counters: Optional[Span] = None

    def setup(self, batch: int, heads: int, splits: int, dim: int) -> bool:
        rows = batch * heads * splits
        self.partial = self.slab.carve(rows * dim * 4)  # clean: near miss, held by the field, and teardown() restores any field that is set
        if self.partial is None:
            return False
        self.lse = self.slab.carve(rows * 4)  # clean: held by the field, teardown() restores it
        if self.lse is None:
            self.teardown()
            return False
        self.counters = self.slab.carve(batch * heads * 4)  # clean: held by the field, teardown() restores it
        if self.counters is None:
            self.teardown()
            return False
        return True

    def teardown(self) -> None:
        for name in ("partial", "lse", "counters"):
            span = getattr(self, name)
            if span is not None:
                self.slab.restore(span)
                setattr(self, name, None)


class Plan:
    def __init__(self, key, span: Span, splits: int):
        self.key = key
        self.span = span
        self.splits = splits
        self.users = 0


class PlanCache:
    """Plans are shared by layers with equal shapes. ref() adds a user, unref() drops one and frees at zero."""

    def __init__(self, slab: Slab):
        self.slab = slab
        self._plans: Dict[Any, Plan] = {}

    def ref(self, batch: int, heads: int, kv_len: int) -> Optional[Plan]:
        key = (batch, heads, kv_len // 1024)
        plan = self._plans.get(key)
        if plan is None:
            splits = max(1, min(32, kv_len // 1024))
            span = self.slab.carve(batch * heads * splits * 132 * 4)  # leak: rebuild() overwrites plan.span and the granules first carved are never restored
            if span is None:
                return None
            plan = Plan(key, span, splits)
            self._plans[key] = plan
        plan.users += 1
        return plan

    def unref(self, plan: Plan) -> None:
        plan.users -= 1
        if plan.users == 0:
            del self._plans[plan.key]
            self.slab.restore(plan.span)

    def rebuild(self, plan: Plan, splits: int) -> bool:
        bigger = self.slab.carve(plan.span.length * GRANULE * splits // plan.splits)  # leak: a second rebuild() overwrites it in plan.span without restore
        if bigger is None:
            return False
        plan.span = bigger
        plan.splits = splits
        return True


def decode(slab: Slab, plans: PlanCache, kernel, q, k_cache, v_cache, lens) -> torch.Tensor:
    b, h, d = q.shape
    plan = plans.ref(b, h, int(lens.max()))  # clean: unref on every return
    if plan is None:
        return kernel.single(q, k_cache, v_cache, lens)
    if plan.splits == 1:
        plans.unref(plan)
        return kernel.single(q, k_cache, v_cache, lens)
    ws = Workspace(slab)
    if not ws.setup(b, h, plan.splits, d):  # clean: near miss, a setup that fails has torn itself down, otherwise finally does it
        plans.unref(plan)
        return kernel.single(q, k_cache, v_cache, lens)
    try:
        out = torch.empty_like(q)
        kernel.split(q, k_cache, v_cache, lens, slab.tensor(ws.partial, torch.float32, (b, h, plan.splits, d)), out)
        return out
    finally:
        ws.teardown()
        plans.unref(plan)


def prefill_chunk(plans: PlanCache, kernel, q, k, v, window: Optional[int]) -> Optional[torch.Tensor]:
    plan = plans.ref(q.shape[0], q.shape[1], k.shape[2])  # leak: no unref when the window covers nothing
    if plan is None:
        return None
    if window is not None and window <= 0:
        return torch.zeros_like(q)
    out = kernel.prefill(q, k, v, window, plan.splits)
    plans.unref(plan)
    return out


def count_fitting(plans: PlanCache, shapes: Sequence[tuple]) -> int:
    """How many of the shapes could be planned as things stand."""
    fitting = 0
    for b, h, n in shapes:
        plan = plans.ref(b, h, n)  # leak: the loop's user is never dropped
        if plan is None:
            log.info("slab is full after %d plans", fitting)
            break
        fitting += 1
    return fitting


def pin_plans(plans: PlanCache, layers: List[Any]) -> bool:
    pinned: List[Plan] = []
    for layer in layers:
        plan = plans.ref(layer.batch, layer.heads, layer.max_len)  # clean: near miss, on failure all pinned are dropped, else each layer has one
        if plan is None:
            for p in pinned:
                plans.unref(p)
            return False
        pinned.append(plan)
    for layer, plan in zip(layers, pinned):
        layer.plan = plan
    return True


def unpin(plans: PlanCache, layers: List[Any]) -> None:
    for layer in layers:
        if layer.plan is not None:
            plans.unref(layer.plan)
            layer.plan = None


class TileScheduler:
    """Persistent-kernel tile counters; one span for each queue."""

    def __init__(self, slab: Slab, n_queues: int):
        self.slab = slab
        self.queues: List[Span] = []
        for _ in range(n_queues):
            span = slab.carve(GRANULE)  # clean: appended to queues, shutdown() restores them
            if span is None:
                self.shutdown()
                raise MemoryError("no granule for a tile queue")
            self.queues.append(span)

    def swap(self, i: int) -> Span:
        fresh = self.slab.carve(GRANULE)  # clean: near miss, it is in queues before the old one is restored
        if fresh is None:
            return self.queues[i]
        old, self.queues[i] = self.queues[i], fresh
        self.slab.restore(old)
        return fresh

    def shutdown(self) -> None:
        while self.queues:
            self.slab.restore(self.queues.pop())


def autotune(slab: Slab, kernel, q, candidates: Sequence[int]) -> Optional[int]:
    best, best_ms = None, float("inf")
    for splits in candidates:
        ws = Workspace(slab)
        if not ws.setup(q.shape[0], q.shape[1], splits, q.shape[2]):  # leak: a candidate that will not launch is skipped with its workspace standing
            continue
        ms = kernel.bench(q, splits, slab.tensor(ws.counters, torch.int32, (q.shape[0] * q.shape[1],)))
        if ms is None:
            continue
        ws.teardown()
        if ms < best_ms:
            best, best_ms = splits, ms
    return best


def host_mirror(slab: Slab, nbytes: int) -> Optional[ctypes.Array]:
    span = slab.carve(nbytes)  # leak: the oversized case returns without restore
    if span is None:
        return None
    if span.length * GRANULE > 1 << 20:
        log.warning("mirror of %d granules refused", span.length)
        return None
    arr = (ctypes.c_ubyte * nbytes)()
    src = slab.tensor(span, torch.uint8, (nbytes,)).cpu()
    ctypes.memmove(arr, src.data_ptr(), nbytes)
    slab.restore(span)
    return arr
