"""Saved-tensor hooks that move activations to host slots during forward."""
from __future__ import annotations

import threading
import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple

try:
    import torch
except ImportError:
    torch = None

MIN_NUMEL = 4


class HostSlot:
    __slots__ = ("ident", "data", "numel")

    def __init__(self, ident: int, capacity: int):
        self.ident = ident
        self.data = [0.0] * capacity
        self.numel = 0


class SlotBank:
    def __init__(self, count: int, capacity: int):
        self.capacity = capacity
        self._free = [HostSlot(i, capacity) for i in range(count)]
        self.out = 0

    def grab(self) -> Optional[HostSlot]:
        if not self._free:
            return None
        self.out += 1
        return self._free.pop()

    def drop(self, slot: HostSlot) -> None:
        self.out -= 1
        slot.numel = 0
        self._free.append(slot)


class Ticket:
    """What the graph stores in place of an activation."""

    def __init__(self, slot: Optional[HostSlot], value: Any = None):
        self.slot = slot
        self.value = value


class LayerLocks:
    """One lock per layer, created on demand."""

    def __init__(self):
        self._guard = threading.Lock()
        self._locks: Dict[int, threading.Lock] = {}

    def lock_layer(self, layer: int) -> None:
        with self._guard:
            lock = self._locks.setdefault(layer, threading.Lock())
        lock.acquire()  # clean: held for the caller until unlock_layer

    def try_lock_layer(self, layer: int) -> bool:
        with self._guard:
            lock = self._locks.setdefault(layer, threading.Lock())
        return lock.acquire(blocking=False)  # clean: the caller learns whether it holds the lock

    def unlock_layer(self, layer: int) -> None:
        self._locks[layer].release()


class Offloader:
    def __init__(self, bank: SlotBank, locks: Optional[LayerLocks] = None, keep_last: int = 1):
        self.bank = bank
        self.locks = locks or LayerLocks()
        self.keep_last = keep_last
        self._by_layer: Dict[int, List[HostSlot]] = {}
        self._stash: Dict[Tuple[int, int], HostSlot] = {}
        self._peak: Optional[HostSlot] = None
        self.done_layers: List[int] = []

    # -- hooks -----------------------------------------------------------
    def pack(self, tensor: List[float]) -> Ticket:
        if len(tensor) < MIN_NUMEL or len(tensor) > self.bank.capacity:
            return Ticket(None, tensor)
        slot = self.bank.grab()  # clean: near miss, None falls back to the value, otherwise the ticket carries it to unpack
        if slot is None:
            return Ticket(None, tensor)
        slot.data[: len(tensor)] = tensor
        slot.numel = len(tensor)
        return Ticket(slot)

    def unpack(self, ticket: Ticket) -> List[float]:
        if ticket.slot is None:
            return ticket.value
        slot, ticket.slot = ticket.slot, None
        ticket.value = slot.data[: slot.numel]
        self.bank.drop(slot)
        return ticket.value

    def pack_tracked(self, tensor: List[float]) -> Ticket:
        slot = self.bank.grab()  # clean: near miss, the finalizer drops it with the ticket
        if slot is None:
            return Ticket(None, tensor)
        slot.data[: len(tensor)] = tensor
        ticket = Ticket(None, slot.data)
        weakref.finalize(ticket, self.bank.drop, slot)
        return ticket

    def pack_compressed(self, tensor: List[float], threshold: float) -> Ticket:
        slot = self.bank.grab()  # leak: a tensor that is mostly zeros returns a plain ticket and forgets the slot
        if slot is None:
            return Ticket(None, tensor)
        dense = [v for v in tensor if abs(v) > threshold]
        if len(dense) * 4 < len(tensor):
            return Ticket(None, tensor)
        slot.data[: len(tensor)] = tensor
        slot.numel = len(tensor)
        return Ticket(slot)

    # -- layers ----------------------------------------------------------
    def offload_layer(self, layer: int, tensors: List[List[float]]) -> int:
        held = self._by_layer.setdefault(layer, [])
        for t in tensors:
            slot = self.bank.grab()  # clean: near miss, in the layer's list until reload_layer or reset
            if slot is None:
                break
            slot.data[: len(t)] = t
            slot.numel = len(t)
            held.append(slot)
        return len(held)

    def reload_layer(self, layer: int) -> List[List[float]]:
        out = []
        for slot in self._by_layer.pop(layer, []):
            out.append(slot.data[: slot.numel])
            self.bank.drop(slot)
        return out

    def stash(self, layer: int, index: int, values: List[float]) -> bool:
        slot = self.bank.grab()  # leak: prune deletes the older layers' entries without dropping their slots
        if slot is None:
            return False
        key = (layer, index)
        if key in self._stash:
            self.bank.drop(self._stash.pop(key))
        slot.data[: len(values)] = values
        slot.numel = len(values)
        self._stash[key] = slot
        return True

    def unstash(self, layer: int, index: int) -> Optional[List[float]]:
        slot = self._stash.pop((layer, index), None)
        if slot is None:
            return None
        values = slot.data[: slot.numel]
        self.bank.drop(slot)
        return values

    def prune(self, newest: int) -> None:
        for key in [k for k in self._stash if k[0] < newest - self.keep_last]:
            del self._stash[key]

    def reset(self) -> None:
        for layer in list(self._by_layer):
            self.reload_layer(layer)
        for slot in self._stash.values():
            self.bank.drop(slot)
        self._stash.clear()

    # -- locked sections -------------------------------------------------
    def evict_idle(self, layers: List[int]) -> int:
        n = 0
        for layer in layers:
            if not self.locks.try_lock_layer(layer):  # leak: a layer that is not done is skipped by the continue with its lock held
                continue
            if layer not in self.done_layers:
                continue
            self.reload_layer(layer)
            self.locks.unlock_layer(layer)
            n += 1
        return n

    def finish_layer(self, layer: int) -> bool:
        self.locks.lock_layer(layer)  # clean: near miss, every return passes the finally
        try:
            if layer in self.done_layers:
                return False
            self.reload_layer(layer)
            self.done_layers.append(layer)
            return True
        finally:
            self.locks.unlock_layer(layer)

    def move_layer(self, src: int, dst: int) -> bool:
        self.locks.lock_layer(src)  # clean: unlocked at both ends
        if not self.locks.try_lock_layer(dst):  # clean: near miss, the failing branch unlocks only the one it holds
            self.locks.unlock_layer(src)
            return False
        moved = self._by_layer.pop(src, [])
        self._by_layer.setdefault(dst, []).extend(moved)
        self.locks.unlock_layer(dst)
        self.locks.unlock_layer(src)
        return bool(moved)

    # -- measuring -------------------------------------------------------
    def remember_peak(self, values: List[float]) -> None:
        slot = self.bank.grab()  # leak: a lower peak than the remembered one returns and forgets it
        if slot is None:
            return
        slot.data[: len(values)] = values
        slot.numel = len(values)
        if self._peak is not None:
            if max(values) <= max(self._peak.data[: self._peak.numel]):
                return
            self.bank.drop(self._peak)
        self._peak = slot

    def take_peak(self) -> List[float]:
        slot, self._peak = self._peak, None
        if slot is None:
            return []
        values = slot.data[: slot.numel]
        self.bank.drop(slot)
        return values

    def round_trip(self, tensor: List[float], fn: Callable[[List[float]], List[float]]) -> Optional[List[float]]:
        slot = self.bank.grab()  # clean: near miss, the handler falls through to the drop
        if slot is None:
            return None
        slot.data[: len(tensor)] = tensor
        result: Optional[List[float]] = None
        try:
            result = fn(slot.data[: len(tensor)])
        except (ValueError, ArithmeticError):
            result = None
        self.bank.drop(slot)
        return result


def saved_tensor_hooks(off: Offloader):
    if torch is None:
        raise RuntimeError("saved-tensor hooks need torch")
    return torch.autograd.graph.saved_tensors_hooks(off.pack, off.unpack)


if __name__ == "__main__":
    bank = SlotBank(4, 8)
    off = Offloader(bank)
    tickets = [off.pack(v) for v in ([1.0] * 5, [2.0] * 2)]  # clean: each one is unpacked
    print([off.unpack(t) for t in tickets], bank.out)
    t = off.pack_tracked([1.0])  # clean: near miss, deleting the ticket runs its finalizer
    del t
    off.offload_layer(0, [[1.0], [2.0]]), off.move_layer(0, 1), off.finish_layer(1), off.stash(0, 0, [1.0])
    off.stash(0, 0, [2.0]), off.unstash(0, 0), off.remember_peak([1.0]), off.remember_peak([2.0]), off.take_peak()
    print(off.round_trip([1.0], lambda v: [1 / 0]), off.evict_idle([1]), bank.out)
    off.reset()
