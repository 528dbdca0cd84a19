"""Offload saved activations to pinned host memory with saved-tensor hooks."""
from __future__ import annotations

import bisect
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Union

import torch

MIN_BYTES = 1 << 16


@dataclass(eq=False)
class PinnedBlock:
    nbytes: int
    storage: torch.Tensor

    def as_tensor(self, like: torch.Tensor) -> torch.Tensor:
        need = like.numel() * like.element_size()
        return self.storage[:need].view(like.dtype).view(like.shape)


class PinnedPool:
    """Size-classed blocks of page-locked memory under one budget."""

    CLASSES = [1 << k for k in range(16, 31)]

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.taken = 0
        self._idle: Dict[int, List[PinnedBlock]] = {c: [] for c in self.CLASSES}
        self._mu = threading.Lock()

    def borrow(self, nbytes: int) -> Optional[PinnedBlock]:
        idx = bisect.bisect_left(self.CLASSES, nbytes)
        if idx == len(self.CLASSES):
            return None
        size = self.CLASSES[idx]
        with self._mu:
            if self.taken + size > self.budget:
                return None
            self.taken += size
            if self._idle[size]:
                return self._idle[size].pop()
        return PinnedBlock(size, torch.empty(size, dtype=torch.uint8, pin_memory=True))

    def repay(self, block: PinnedBlock) -> None:
        with self._mu:
            self.taken -= block.nbytes
            self._idle[block.nbytes].append(block)


@dataclass
class Ticket:
    """What autograd keeps in place of the activation."""
    key: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


Packed = Union[torch.Tensor, Ticket]


class OffloadEngine:
    def __init__(self, pool: PinnedPool, skip: Callable[[torch.Tensor], bool]) -> None:
        self.pool = pool
        self.skip = skip
        self._parked: "OrderedDict[int, PinnedBlock]" = OrderedDict()
        self._next = 0
        self.refused = 0

    # ---- the two hooks --------------------------------------------------------------------

    def pack(self, t: torch.Tensor) -> Packed:
        nbytes = t.numel() * t.element_size()
        if nbytes < MIN_BYTES:
            return t
        block = self.pool.borrow(nbytes)  # leak: a skipped tensor returns with the block in hand
        if block is None:
            self.refused += 1
            return t
        if self.skip(t):
            return t
        block.as_tensor(t).copy_(t, non_blocking=True)
        key, self._next = self._next, self._next + 1
        self._parked[key] = block
        return Ticket(key, t.shape, t.dtype, t.device)

    def unpack(self, packed: Packed) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        block = self._parked.pop(packed.key)
        out = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device)
        out.copy_(block.as_tensor(out), non_blocking=True)
        torch.cuda.current_stream().synchronize()
        self.pool.repay(block)
        return out

    def reset(self) -> None:
        for block in self._parked.values():
            self.pool.repay(block)
        self._parked.clear()

    def hooks(self):
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)


class LayerOffload(OffloadEngine):
    """Groups blocks by layer, so that a layer's blocks come back together."""

    def __init__(self, pool: PinnedPool, skip) -> None:
        super().__init__(pool, skip)
        self.layer = 0
        self._by_layer: Dict[int, List[PinnedBlock]] = {}
        self._rng_by_layer: Dict[int, PinnedBlock] = {}

    def park(self, t: torch.Tensor) -> Optional[PinnedBlock]:
        block = self.pool.borrow(t.numel() * t.element_size())  # clean: near miss, finish_layer() repays
        if block is not None:
            block.as_tensor(t).copy_(t)
            self._by_layer.setdefault(self.layer, []).append(block)
        return block

    def park_rng(self, state: torch.Tensor) -> bool:
        block = self.pool.borrow(state.numel())  # leak: finish_layer() drops the dict entry without repaying
        if block is None:
            return False
        block.as_tensor(state).copy_(state)
        self._rng_by_layer[self.layer] = block
        return True

    def rng_of(self, layer: int, like: torch.Tensor) -> Optional[torch.Tensor]:
        block = self._rng_by_layer.get(layer)
        return None if block is None else block.as_tensor(like).clone()

    def finish_layer(self, layer: int) -> int:
        blocks = self._by_layer.pop(layer, [])
        for block in blocks:
            self.pool.repay(block)
        self._rng_by_layer.pop(layer, None)
        return len(blocks)

    def reset(self) -> None:
        for layer in list(self._by_layer):
            self.finish_layer(layer)
        self._rng_by_layer.clear()
        super().reset()


# ---- host-side helpers that stage through the same pool --------------------------------------


def borrow_for(pool: PinnedPool, t: torch.Tensor) -> PinnedBlock:
    """A block that fits t."""
    need = t.numel() * t.element_size()
    block = pool.borrow(need)  # clean: handed to the caller
    if block is None:
        raise MemoryError(f"no pinned block for {need} bytes")
    return block


def mean_abs(pool: PinnedPool, tensors: List[torch.Tensor]) -> List[float]:
    values = []
    for t in tensors:
        host = borrow_for(pool, t).as_tensor(t)  # leak: only the view is kept, the block itself is gone
        host.copy_(t)
        values.append(float(host.abs().mean()))
    return values


def histogram(pool: PinnedPool, tensors: List[torch.Tensor], bins: int) -> List[torch.Tensor]:
    out: List[torch.Tensor] = []
    block: Optional[PinnedBlock] = None
    for t in tensors:
        need = t.numel() * t.element_size()
        if block is None or block.nbytes < need:
            if block is not None:
                pool.repay(block)
            block = borrow_for(pool, t)  # clean: near miss, the smaller one is repaid before the rebinding
        host = block.as_tensor(t)
        host.copy_(t)
        out.append(torch.histc(host.float(), bins=bins))
    if block is not None:
        pool.repay(block)
    return out


def quantiles(pool: PinnedPool, tensors: List[torch.Tensor], q: float) -> List[float]:
    out: List[float] = []
    block: Optional[PinnedBlock] = None
    for t in tensors:
        need = t.numel() * t.element_size()
        if block is None or block.nbytes < need:
            block = borrow_for(pool, t)  # leak: growing rebinds and loses the smaller block
        host = block.as_tensor(t)
        host.copy_(t)
        out.append(float(host.float().quantile(q)))
    if block is not None:
        pool.repay(block)
    return out


class Stager:
    """Holds one block for its whole life, and swaps it for a bigger one when asked."""

    def __init__(self, pool: PinnedPool, nbytes: int) -> None:
        self.pool = pool
        self.block: Optional[PinnedBlock] = pool.borrow(nbytes)  # clean: grow() and close() repay it

    def grow(self, nbytes: int) -> bool:
        bigger = self.pool.borrow(nbytes)  # clean: becomes the stager's block
        if bigger is None:
            return False
        old, self.block = self.block, bigger
        if old is not None:
            self.pool.repay(old)
        return True

    def close(self) -> None:
        if self.block is not None:
            self.pool.repay(self.block)
            self.block = None

    def __enter__(self) -> "Stager":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


def stage_all(pool: PinnedPool, tensors: List[torch.Tensor], sink: Callable[[torch.Tensor], None]) -> int:
    sent = 0
    with Stager(pool, MIN_BYTES) as stager:  # clean: __exit__ closes it
        for t in tensors:
            need = t.numel() * t.element_size()
            if stager.block is None or (need > stager.block.nbytes and not stager.grow(need)):
                break
            view = stager.block.as_tensor(t)
            view.copy_(t)
            sink(view)
            sent += 1
    return sent


def stage_first(pool: PinnedPool, tensors: List[torch.Tensor], sink: Callable[[torch.Tensor], None]) -> bool:
    stager = Stager(pool, MIN_BYTES)  # leak: nothing closes it when no tensor fits
    for t in tensors:
        if stager.block is not None and t.numel() * t.element_size() <= stager.block.nbytes:
            view = stager.block.as_tensor(t)
            view.copy_(t)
            sink(view)
            stager.close()
            return True
    return False
