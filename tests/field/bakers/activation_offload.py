"""Activation offload through saved-tensor hooks, backed by a slot arena."""
from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

try:
    import torch
except ImportError:
    torch = None


class ArenaFull(Exception):
    pass


class SlotArena:
    """Host memory cut into equal slots; a slot number is the lease."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._store: List[Optional[Any]] = [None] * slots
        self._vacant: List[int] = list(range(slots - 1, -1, -1))

    def reserve(self) -> int:
        if not self._vacant:
            raise ArenaFull()
        return self._vacant.pop()

    def unreserve(self, slot: int) -> None:
        self._store[slot] = None
        self._vacant.append(slot)

    def write(self, slot: int, value: Any) -> None:
        self._store[slot] = value

    def read(self, slot: int) -> Any:
        return self._store[slot]

    @property
    def vacant(self) -> int:
        return len(self._vacant)


@dataclass
class Packed:
    slot: int
    shape: Tuple[int, ...]
    kept: Optional[Any] = None


def _nbytes(tensor: Any) -> int:
    if torch is not None and isinstance(tensor, torch.Tensor):
        return tensor.numel() * tensor.element_size()
    return len(tensor)


def _shape(tensor: Any) -> Tuple[int, ...]:
    return tuple(getattr(tensor, "shape", (len(tensor),)))


class OffloadHooks:
    """pack/unpack pair for ``torch.autograd.graph.saved_tensors_hooks``."""

    def __init__(self, arena: SlotArena, min_bytes: int = 1 << 10) -> None:
        self.arena = arena
        self.min_bytes = min_bytes
        self.kept_on_device = 0

    def pack(self, tensor: Any) -> Packed:
        if _nbytes(tensor) < self.min_bytes:
            return Packed(-1, _shape(tensor), kept=tensor)
        try:
            slot = self.arena.reserve()  # clean: near miss, the handler is the failed reserve itself, else kept in Packed
        except ArenaFull:
            self.kept_on_device += 1
            return Packed(-1, _shape(tensor), kept=tensor)
        self.arena.write(slot, tensor)
        return Packed(slot, _shape(tensor))

    def unpack(self, packed: Packed) -> Any:
        if packed.slot < 0:
            return packed.kept
        value = self.arena.read(packed.slot)
        self.arena.unreserve(packed.slot)
        packed.slot = -1
        packed.kept = value
        return value


class LayerActivations:
    """Explicit offload for engines that run layers by hand."""

    def __init__(self, arena: SlotArena, layers: int) -> None:
        self.arena = arena
        self.layers = layers
        self._by_layer: Dict[int, List[int]] = {}
        self._boundary: Optional[int] = None

    def save(self, layer: int, tensors: List[Any]) -> None:
        slots = self._by_layer.setdefault(layer, [])
        for tensor in tensors:
            slot = self.arena.reserve()  # clean: kept in the layer's list, restore and discard unreserve
            self.arena.write(slot, tensor)
            slots.append(slot)

    def restore(self, layer: int) -> List[Any]:
        values = []
        for slot in self._by_layer.pop(layer, []):
            values.append(self.arena.read(slot))
            self.arena.unreserve(slot)
        return values

    def discard(self, layer: int) -> None:
        for slot in self._by_layer.pop(layer, ()):
            self.arena.unreserve(slot)

    def replace(self, layer: int, tensors: List[Any]) -> None:
        """Stores recomputed activations for a layer saved earlier."""
        slots = []
        for tensor in tensors:
            slot = self.arena.reserve()  # clean: kept in the table, restore unreserves
            self.arena.write(slot, tensor)
            slots.append(slot)
        self.discard(layer)
        self._by_layer[layer] = slots

    def run_stages(self, stages: List[Callable[[Any], Any]], x: Any) -> Any:
        for stage in stages:
            self._boundary = self.arena.reserve()  # leak: the next stage overwrites the field, only the last slot is unreserved
            self.arena.write(self._boundary, x)
            x = stage(x)
        if self._boundary is not None:
            self.arena.unreserve(self._boundary)
            self._boundary = None
        return x

    def save_if_needed(self, layer: int, tensor: Any, recompute: bool) -> Optional[int]:
        slot = self.arena.reserve()  # leak: with recompute the slot is dropped by the early return
        if recompute:
            return None
        self.arena.write(slot, tensor)
        self._by_layer.setdefault(layer, []).append(slot)
        return slot

    def verify(self, tensors: List[Any]) -> int:
        bad = 0
        for tensor in tensors:
            slot = self.arena.reserve()  # clean: near miss, continue passes through finally
            try:
                self.arena.write(slot, tensor)
                if self.arena.read(slot) == tensor:
                    continue
                bad += 1
            finally:
                self.arena.unreserve(slot)
        return bad


@contextmanager
def staged(arena: SlotArena, value: Any, keep: bool = False) -> Iterator[int]:
    slot = arena.reserve()  # clean: near miss, with keep the caller has taken the slot over
    arena.write(slot, value)
    try:
        yield slot
    finally:
        if not keep:
            arena.unreserve(slot)


def stash_final(arena: SlotArena, owner: LayerActivations, layer: int, value: Any) -> None:
    with staged(arena, value, keep=True) as slot:  # clean: near miss, kept slot goes into the owner's table
        owner._by_layer.setdefault(layer, []).append(slot)


def stash_length(arena: SlotArena, value: Any) -> int:
    with staged(arena, value, keep=True) as slot:  # leak: keep means nobody unreserves, and the slot number is dropped
        return len(arena.read(slot))


class MicrobatchStash:
    """FIFO of slots between forward and backward of a pipeline stage."""

    def __init__(self, arena: SlotArena) -> None:
        self.arena = arena
        self.fifo: List[int] = []

    def push(self, value: Any) -> None:
        slot = self.arena.reserve()  # clean: queued, pop and clear unreserve
        self.arena.write(slot, value)
        self.fifo.append(slot)

    def pop(self) -> Any:
        slot = self.fifo.pop(0)
        value = self.arena.read(slot)
        self.arena.unreserve(slot)
        return value

    def clear(self) -> None:
        for slot in self.fifo:
            self.arena.unreserve(slot)
        self.fifo.clear()


def interleaved(stash: MicrobatchStash, forward: Callable, backward: Callable, batches: List[Any]) -> None:
    warmup = min(2, len(batches))
    for batch in batches[:warmup]:
        stash.push(forward(batch))  # clean: popped by the steady loop or the drain
    for batch in batches[warmup:]:
        stash.push(forward(batch))  # clean: popped in the same iteration or by the drain
        backward(stash.pop())
    while stash.fifo:
        backward(stash.pop())
