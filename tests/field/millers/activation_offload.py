"""Activation offload to pinned host memory with saved-tensor hooks."""
from __future__ import annotations

import logging
import threading
from typing import Any, Dict, List, Optional, Tuple

try:
    import torch
except ImportError:  # docs build
    torch = None

log = logging.getLogger(__name__)

MIN_OFFLOAD_BYTES = 1 << 20


class PinnedBlock:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) if torch else bytearray(nbytes)

    def view_as(self, t: "torch.Tensor") -> "torch.Tensor":
        return self.tensor[: t.numel() * t.element_size()].view(t.dtype).view(t.shape)


class PinnedArena:
    """Power-of-two size classes of page-locked memory under one budget."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._in_use = 0
        self._classes: Dict[int, List[PinnedBlock]] = {}
        self._lock = threading.Lock()

    @staticmethod
    def _round(nbytes: int) -> int:
        return 1 << max(12, (nbytes - 1).bit_length())

    def borrow(self, nbytes: int) -> Optional[PinnedBlock]:
        size = self._round(nbytes)
        with self._lock:
            if self._in_use + size > self._budget:
                return None
            self._in_use += size
            spare = self._classes.get(size)
            if spare:
                return spare.pop()
        return PinnedBlock(size)

    def give_back(self, block: PinnedBlock) -> None:
        with self._lock:
            self._in_use -= block.nbytes
            self._classes.setdefault(block.nbytes, []).append(block)

    def borrow_or_trim(self, nbytes: int) -> Optional[PinnedBlock]:
        block = self.borrow(nbytes)  # clean: returned to the caller, None otherwise
        if block is not None:
            return block
        with self._lock:
            self._classes.clear()
        return self.borrow(nbytes)  # clean: returned to the caller


class CopyError(RuntimeError):
    pass


def copy_out(src: "torch.Tensor", block: PinnedBlock, stream: Any) -> None:
    if src.is_sparse:
        raise CopyError("sparse activations cannot be offloaded")
    with torch.cuda.stream(stream):
        block.view_as(src).copy_(src, non_blocking=True)


def copy_in(block: PinnedBlock, meta: Tuple[Any, Any, Any]) -> "torch.Tensor":
    shape, dtype, device = meta
    dst = torch.empty(shape, dtype=dtype, device=device)
    dst.copy_(block.view_as(dst), non_blocking=True)
    return dst


class OffloadHandle:
    """What autograd keeps in place of the tensor."""

    __slots__ = ("block", "meta", "resident")

    def __init__(self, block: Optional[PinnedBlock], meta: Tuple[Any, Any, Any], resident: Any = None) -> None:
        self.block = block
        self.meta = meta
        self.resident = resident


class SavedTensorOffloader:
    def __init__(self, arena: PinnedArena, stream: Any) -> None:
        self.arena = arena
        self.stream = stream
        self.failed = 0

    def pack(self, t: "torch.Tensor") -> OffloadHandle:
        meta = (t.shape, t.dtype, t.device)
        nbytes = t.numel() * t.element_size()
        if nbytes < MIN_OFFLOAD_BYTES:
            return OffloadHandle(None, meta, t)
        block = self.arena.borrow(nbytes)  # leak: CopyError is survived and the handle keeps no block
        if block is None:
            return OffloadHandle(None, meta, t)
        try:
            copy_out(t, block, self.stream)
        except CopyError:
            self.failed += 1
            return OffloadHandle(None, meta, t)
        return OffloadHandle(block, meta)

    def unpack(self, h: OffloadHandle) -> "torch.Tensor":
        if h.block is None:
            return h.resident
        t = copy_in(h.block, h.meta)
        self.arena.give_back(h.block)
        h.block = None
        return t


class CheckpointedBlockStore:
    """Inputs of recomputed blocks, keyed by layer; at most one microbatch in flight."""

    def __init__(self, arena: PinnedArena, stream: Any) -> None:
        self.arena = arena
        self.stream = stream
        self._table: Dict[int, Tuple[PinnedBlock, Tuple[Any, Any, Any]]] = {}

    def stash(self, layer: int, t: "torch.Tensor") -> bool:
        nbytes = t.numel() * t.element_size()
        block = self.arena.borrow_or_trim(nbytes)  # clean: near miss, tabled, or given back on CopyError, or None
        if block is None:
            return False
        try:
            copy_out(t, block, self.stream)
        except CopyError as e:
            log.warning("layer %d kept on device: %s", layer, e)
            self.arena.give_back(block)
            return False
        self.drop(layer)
        self._table[layer] = (block, (t.shape, t.dtype, t.device))
        return True

    def fetch(self, layer: int) -> Optional["torch.Tensor"]:
        entry = self._table.pop(layer, None)
        if entry is None:
            return None
        block, meta = entry
        t = copy_in(block, meta)
        self.arena.give_back(block)
        return t

    def drop(self, layer: int) -> None:
        entry = self._table.pop(layer, None)
        if entry is not None:
            self.arena.give_back(entry[0])

    def clear(self) -> None:
        for layer in list(self._table):
            self.drop(layer)


class RngStash:
    """Dropout RNG states saved beside the activations."""

    def __init__(self, arena: PinnedArena) -> None:
        self.arena = arena
        self._states: Dict[int, PinnedBlock] = {}

    def save(self, layer: int, state: bytes) -> None:
        block = self.arena.borrow(len(state))  # leak: restore pops the entry for a recompute without give_back
        if block is None:
            raise MemoryError("rng stash")
        block.tensor[: len(state)] = state
        self._states[layer] = block

    def restore(self, layer: int, n: int) -> bytes:
        block = self._states.pop(layer)
        return bytes(block.tensor[:n])


class OffloadRegion:
    """``with OffloadRegion(arena, nbytes) as block`` around one recomputed segment."""

    def __init__(self, arena: PinnedArena, nbytes: int) -> None:
        self.arena = arena
        self.nbytes = nbytes
        self.block: Optional[PinnedBlock] = None

    def __enter__(self) -> Optional[PinnedBlock]:
        self.block = self.arena.borrow(self.nbytes)  # leak: __exit__ returns early on CopyError, which it swallows
        return self.block

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is not None and issubclass(exc_type, CopyError):
            log.warning("segment not offloaded: %s", exc)
            return True
        if self.block is not None:
            self.arena.give_back(self.block)
            self.block = None
        return False


class OptimizerRegion:
    def __init__(self, arena: PinnedArena, nbytes: int) -> None:
        self.arena = arena
        self.nbytes = nbytes
        self.block: Optional[PinnedBlock] = None

    def __enter__(self) -> "OptimizerRegion":
        self.block = self.arena.borrow(self.nbytes)  # clean: near miss, __exit__ returns early only if there is no block
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self.block is None:
            return False
        self.arena.give_back(self.block)
        self.block = None
        return exc_type is not None and issubclass(exc_type, CopyError)


def measure_bandwidth(arena: PinnedArena, sizes: List[int]) -> Dict[int, bool]:
    fits: Dict[int, bool] = {}
    for n in sizes:
        block = arena.borrow(n)  # clean: near miss, the continue is only taken without a block
        if block is None:
            fits[n] = False
            continue
        fits[n] = True
        arena.give_back(block)
    return fits


def reserve_moments(arena: PinnedArena, nbytes: int) -> Optional[Tuple[PinnedBlock, PinnedBlock]]:
    exp_avg = arena.borrow(nbytes)  # leak: lost when the second moment does not fit
    if exp_avg is None:
        return None
    exp_avg_sq = arena.borrow(nbytes)  # clean: returned in the pair, None otherwise
    if exp_avg_sq is None:
        return None
    return exp_avg, exp_avg_sq


def swap_moments(arena: PinnedArena, nbytes: int) -> bool:
    pair = reserve_moments(arena, nbytes)  # clean: both given back below
    if not pair:
        return False
    first, second = pair
    first.tensor[:1], second.tensor[:1] = second.tensor[:1], first.tensor[:1]
    arena.give_back(second)
    arena.give_back(first)
    return True


def main() -> None:
    arena = PinnedArena(1 << 20)
    assert measure_bandwidth(arena, [4096, 1 << 21]) == {4096: True, 1 << 21: False}
    assert swap_moments(arena, 8192)
    stash = RngStash(arena)
    stash.save(0, b"xyz")
    assert stash.restore(0, 3) == b"xyz"
    print(arena._in_use)


if __name__ == "__main__":
    main()
