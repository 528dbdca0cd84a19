"""CPU offload of saved activations through torch.autograd.graph.saved_tensors_hooks.

The pinned arena is one big tensor cut into equal slots. A slot number is all that the
autograd graph keeps for an offloaded activation.
"""
import contextlib
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple, Union

import torch


class PinnedArena:
    def __init__(self, slots: int, slot_bytes: int):
        self.slot_bytes = slot_bytes
        self._store = torch.empty(slots * slot_bytes, dtype=torch.uint8, pin_memory=True)
        self._bitmap = (1 << slots) - 1  # bit set = slot free
        self.peak = 0
        self._used = 0

    def alloc_slot(self) -> int:
        if not self._bitmap:
            return -1
        low = self._bitmap & -self._bitmap
        self._bitmap ^= low  # clean: the slot number is returned
        self._used += 1
        self.peak = max(self.peak, self._used)
        return low.bit_length() - 1

    def free_slot(self, slot: int) -> None:
        assert not (self._bitmap >> slot) & 1, f"slot {slot} freed twice"
        self._bitmap |= 1 << slot
        self._used -= 1

    def view(self, slot: int, like: torch.Tensor) -> torch.Tensor:
        base = slot * self.slot_bytes
        nbytes = like.numel() * like.element_size()
        return self._store[base : base + nbytes].view(like.dtype).view(like.shape)


@dataclass
class Parked:
    slot: int
    meta: torch.Tensor
    device: torch.device
    done: Optional[torch.cuda.Event] = None


class ActivationOffloader:
    def __init__(self, arena: PinnedArena, min_numel: int = 1 << 16):
        self.arena = arena
        self.min_numel = min_numel
        self.stream = torch.cuda.Stream()
        self._by_layer: Dict[str, List[Parked]] = {}
        self._layer = "root"

    def pack(self, t: torch.Tensor) -> Union[torch.Tensor, Parked]:
        if t.numel() < self.min_numel or not t.is_cuda:
            return t
        slot = self.arena.alloc_slot()  # leak: an activation too big for a slot is returned as is, the slot stays taken
        if slot < 0:
            return t
        if t.numel() * t.element_size() > self.arena.slot_bytes:
            return t
        return self._park(slot, t)

    def _park(self, slot: int, t: torch.Tensor) -> Parked:
        done = torch.cuda.Event()
        with torch.cuda.stream(self.stream):
            self.arena.view(slot, t).copy_(t, non_blocking=True)
            done.record(self.stream)
        return Parked(slot, torch.empty_like(t, device="meta"), t.device, done)

    def unpack(self, saved: Union[torch.Tensor, Parked]) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        saved.done.synchronize()
        out = self.arena.view(saved.slot, saved.meta).to(saved.device)
        self.arena.free_slot(saved.slot)
        return out

    @contextlib.contextmanager
    def offload(self):
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            yield self

    def stash(self, layer: str, t: torch.Tensor) -> bool:
        slot = self.arena.alloc_slot()  # clean: near miss, kept in the layer's list, restore() and discard() free it
        if slot == -1:
            return False
        self._by_layer.setdefault(layer, []).append(self._park(slot, t))
        return True

    def restore(self, layer: str) -> List[torch.Tensor]:
        return [self.unpack(p) for p in self._by_layer.pop(layer, [])]

    def discard(self, layer: str) -> None:
        for p in self._by_layer.pop(layer, []):
            self.arena.free_slot(p.slot)

    def stash_pair(self, layer: str, hidden: torch.Tensor, residual: torch.Tensor) -> bool:
        first = self.arena.alloc_slot()  # leak: no second slot means False is returned with the first still taken
        if first < 0:
            return False
        second = self.arena.alloc_slot()  # clean: near miss, only a failed allocation leaves without parking
        if second < 0:
            return False
        entry = self._by_layer.setdefault(layer, [])
        entry.append(self._park(first, hidden))
        entry.append(self._park(second, residual))
        return True

    def stash_all(self, layer: str, tensors: List[torch.Tensor]) -> bool:
        taken: List[int] = []
        for _ in tensors:
            slot = self.arena.alloc_slot()  # clean: near miss, a shortfall frees all that were taken so far
            if slot < 0:
                for s in taken:
                    self.arena.free_slot(s)
                return False
            taken.append(slot)
        self._by_layer.setdefault(layer, []).extend(self._park(s, t) for s, t in zip(taken, tensors))
        return True

    def replace(self, layer: str, tensors: List[torch.Tensor]) -> None:
        self.discard(layer)
        parked = []
        for t in tensors:
            slot = self.arena.alloc_slot()  # clean: collected and stored under the layer after the loop
            if slot < 0:
                break
            parked.append(self._park(slot, t))
        self._by_layer[layer] = parked


class RngSlotKeeper:
    """Remembers the CUDA rng state of each checkpointed segment in an arena slot."""

    def __init__(self, arena: PinnedArena):
        self.arena = arena
        self._slots: Dict[int, Tuple[int, torch.Tensor]] = {}

    def save(self, segment: int) -> None:
        state = torch.cuda.get_rng_state()
        slot = self.arena.alloc_slot()  # leak: recomputing a segment saves again and overwrites the slot in the dict
        if slot < 0:
            raise RuntimeError("offload arena is full")
        self.arena.view(slot, state).copy_(state)
        self._slots[segment] = (slot, state)

    def load(self, segment: int) -> None:
        slot, like = self._slots[segment]
        torch.cuda.set_rng_state(self.arena.view(slot, like).clone())

    def clear(self) -> None:
        for slot, _ in self._slots.values():
            self.arena.free_slot(slot)
        self._slots.clear()


def measure_bandwidth(arena: PinnedArena, t: torch.Tensor, rounds: int) -> float:
    """GB/s of device-to-host copies into one slot."""
    slot = arena.alloc_slot()  # clean: freed on both ways out
    if slot < 0:
        return 0.0
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if rounds <= 0:
        arena.free_slot(slot)
        return 0.0
    start.record()
    for _ in range(rounds):
        arena.view(slot, t).copy_(t, non_blocking=True)
    end.record()
    end.synchronize()
    arena.free_slot(slot)
    return rounds * t.numel() * t.element_size() / start.elapsed_time(end) / 1e6


def warm_arena(arena: PinnedArena, sizes: List[torch.Tensor]) -> int:
    touched = 0
    for t in sizes:
        slot = arena.alloc_slot()  # leak: freed once after the loop, every earlier iteration's slot is rebound away
        if slot < 0:
            break
        arena.view(slot, t).zero_()
        touched += 1
    if touched and slot >= 0:
        arena.free_slot(slot)
    return touched
