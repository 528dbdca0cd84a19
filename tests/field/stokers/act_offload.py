from __future__ import annotations

import logging
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, DefaultDict, Dict, List, Optional, Union

import torch

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class PinnedSlab:
    data: torch.Tensor
    bucket: int


class PinnedPool:
    """Pinned host slabs bucketed by power of two size, bounded in bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit = limit_bytes
        self.allocated = 0
        self._lock = threading.Lock()
        self._idle: DefaultDict[int, List[PinnedSlab]] = defaultdict(list)

    def checkout(self, nbytes: int) -> Optional[PinnedSlab]:
        bucket = 1 << max(12, (nbytes - 1).bit_length())
        with self._lock:
            idle = self._idle[bucket]
            if idle:
                return idle.pop()
            if self.allocated + bucket > self.limit:
                return None
            self.allocated += bucket
        return PinnedSlab(torch.empty(bucket, dtype=torch.uint8, pin_memory=True), bucket)

    def checkin(self, slab: PinnedSlab) -> None:
        with self._lock:
            self._idle[slab.bucket].append(slab)


class EventPool:
    def __init__(self) -> None:
        self._events: List[torch.cuda.Event] = []

    def get(self) -> torch.cuda.Event:
        return self._events.pop() if self._events else torch.cuda.Event()

    def put(self, event: torch.cuda.Event) -> None:
        self._events.append(event)


@dataclass(eq=False)
class Offloaded:
    slab: PinnedSlab
    ready: torch.cuda.Event
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    layer: int


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(-1).view(torch.uint8)


class ActivationOffloader:
    """Saved tensor hooks that spill large activations into pinned memory."""

    def __init__(self, pool: PinnedPool, events: EventPool, min_bytes: int) -> None:
        self.pool = pool
        self.events = events
        self.min_bytes = min_bytes
        self.stream = torch.cuda.Stream()
        self.layer = -1
        self.by_layer: DefaultDict[int, List[Offloaded]] = defaultdict(list)
        self.restored: Dict[int, torch.Tensor] = {}
        self.rng_slab: Optional[PinnedSlab] = None
        self.fence: Optional[torch.cuda.Event] = None

    def _stage(self, t: torch.Tensor) -> Optional[PinnedSlab]:
        slab = self.pool.checkout(t.nbytes)  # clean: near miss, tensors on the host check it in again, others pass it on
        if slab is None:
            return None
        if t.device.type != "cuda":
            self.pool.checkin(slab)
            return None
        with torch.cuda.stream(self.stream):
            slab.data[: t.nbytes].copy_(as_bytes(t), non_blocking=True)
        return slab

    def pack(self, t: torch.Tensor) -> Union[torch.Tensor, Offloaded]:
        if t.nbytes < self.min_bytes:
            return t
        ready = self.events.get()  # leak: where no slab could be staged the event is not put back
        slab = self._stage(t)  # clean: kept in the record, checked in by unpack or drop_layer
        if slab is None:
            return t
        ready.record(self.stream)
        rec = Offloaded(slab, ready, t.shape, t.dtype, t.device, self.layer)
        self.by_layer[self.layer].append(rec)
        return rec

    def _settle(self, rec: Offloaded) -> None:
        self.pool.checkin(rec.slab)
        self.events.put(rec.ready)

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        cached = self.restored.pop(id(packed), None)
        if cached is not None:
            return cached
        return self._bring_back(packed)

    def _bring_back(self, rec: Offloaded) -> torch.Tensor:
        done = self.events.get()  # clean: near miss, put back by the finally
        try:
            out = torch.empty(rec.shape, dtype=rec.dtype, device=rec.device)
            with torch.cuda.stream(self.stream):
                rec.ready.wait(self.stream)
                as_bytes(out).copy_(rec.slab.data[: out.nbytes], non_blocking=True)
                done.record(self.stream)
            done.wait()
            done.synchronize()
        finally:
            self.events.put(done)
        self.by_layer[rec.layer].remove(rec)
        self._settle(rec)
        return out

    def prefetch(self, layer: int) -> int:
        count = 0
        for rec in list(self.by_layer.get(layer, ())):
            self.restored[id(rec)] = self._bring_back(rec)
            count += 1
        return count

    def drop_layer(self, layer: int) -> None:
        for rec in self.by_layer.pop(layer, []):
            self._settle(rec)

    def save_rng(self, state: torch.Tensor) -> bool:
        if self.rng_slab is not None:
            self.pool.checkin(self.rng_slab)
        self.rng_slab = self.pool.checkout(state.nbytes)  # clean: near miss, the slab of before was checked in and finish returns this one
        if self.rng_slab is None:
            return False
        self.rng_slab.data[: state.nbytes].copy_(as_bytes(state))
        return True

    def set_fence(self) -> None:
        self.fence = self.events.get()  # leak: finish forgets the fence and the next one overwrites it
        self.fence.record(self.stream)

    def wait_fence(self) -> None:
        if self.fence is not None:
            self.fence.synchronize()

    def snapshot(self, tensors: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
        copies: Dict[str, torch.Tensor] = {}
        for name, t in tensors.items():
            slab = self._stage(t)  # leak: only a clone of its bytes is kept, the slab itself is dropped
            if slab is None:
                copies[name] = t.detach().cpu()
                continue
            self.stream.synchronize()
            copies[name] = slab.data[: t.nbytes].clone().view(t.dtype).view(t.shape)
        return copies

    def compare(self, name: str, a: torch.Tensor, b: torch.Tensor) -> Optional[float]:
        left = self._stage(a)  # clean: near miss, both ends and the missing second slab check it in
        if left is None:
            return None
        right = self._stage(b)  # leak: a difference in size returns with only the left slab checked in
        if right is None:
            self.pool.checkin(left)
            return None
        self.stream.synchronize()
        if a.nbytes != b.nbytes:
            logger.warning("%s changed its size", name)
            self.pool.checkin(left)
            return None
        diff = (left.data[: a.nbytes] != right.data[: a.nbytes]).float().mean().item()
        self.pool.checkin(left)
        self.pool.checkin(right)
        return diff

    def finish(self) -> None:
        self.stream.synchronize()
        for layer in list(self.by_layer):
            self.drop_layer(layer)
        if self.rng_slab is not None:
            self.pool.checkin(self.rng_slab)
            self.rng_slab = None
        self.restored.clear()
        self.layer = -1
