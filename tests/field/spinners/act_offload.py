"""Offloads saved activations to host slots through pack and unpack hooks."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence

try:
    import torch
except ImportError:
    torch = None


def nbytes_of(tensor: Any) -> int:
    if torch is not None and isinstance(tensor, torch.Tensor):
        return tensor.numel() * tensor.element_size()
    return len(tensor)


@dataclass
class HostSlot:
    number: int
    size: int
    content: Any = None


class HostSlots:
    """Slots in two sizes; a large slot may serve for a small request."""

    def __init__(self, small: int, large: int, small_size: int, large_size: int) -> None:
        self._small = [HostSlot(i, small_size) for i in range(small)]
        self._large = [HostSlot(small + i, large_size) for i in range(large)]
        self.small_size = small_size
        self.large_size = large_size

    def take(self, nbytes: int) -> Optional[HostSlot]:
        if nbytes <= self.small_size and self._small:
            return self._small.pop()
        if nbytes <= self.large_size and self._large:
            return self._large.pop()
        return None

    def put_back(self, slot: HostSlot) -> None:
        slot.content = None
        (self._small if slot.size == self.small_size else self._large).append(slot)

    def left(self) -> int:
        return len(self._small) + len(self._large)


@dataclass
class Ticket:
    """What autograd keeps in place of the tensor."""

    slot: Optional[HostSlot]
    tensor: Any = None


class OffloadHooks:
    def __init__(self, slots: HostSlots, threshold: int) -> None:
        self.slots = slots
        self.threshold = threshold
        self._layers: Dict[int, List[Ticket]] = {}
        self._anchor: Optional[HostSlot] = None
        self._free_hooks: List[Callable[[], None]] = []

    def pack(self, tensor: Any) -> Ticket:
        if nbytes_of(tensor) < self.threshold:
            return Ticket(None, tensor)
        slot = self.slots.take(nbytes_of(tensor))  # clean: near miss, travels in the ticket, None becomes a ticket with the tensor
        if slot is None:
            return Ticket(None, tensor)
        slot.content = bytes(tensor)
        return Ticket(slot)

    def unpack(self, ticket: Ticket) -> Any:
        if ticket.slot is None:
            return ticket.tensor
        data = ticket.slot.content
        self.slots.put_back(ticket.slot)
        ticket.slot = None
        return data

    def roundtrip(self, tensor: Any) -> Any:
        ticket = self.pack(tensor)  # clean: redeemed by unpack
        return self.unpack(ticket)

    def fits(self, tensor: Any) -> bool:
        """Whether the tensor would be offloaded at the moment."""
        return self.pack(tensor).slot is not None  # leak: the ticket of the trial is dropped with its slot

    def save(self, layer: int, tensor: Any) -> None:
        ticket = self.pack(tensor)  # leak: restore() pops the layer and redeems only its newest ticket
        self._layers.setdefault(layer, []).append(ticket)

    def restore(self, layer: int) -> Any:
        tickets = self._layers.pop(layer, [])
        if not tickets:
            return None
        return self.unpack(tickets[-1])

    def save_group(self, tensors: Sequence[Any]) -> List[Ticket]:
        return [self.pack(t) for t in tensors]  # clean: the tickets are the caller's

    def backward_group(self, tensors: Sequence[Any]) -> int:
        tickets = self.save_group(tensors)  # clean: near miss, popped one by one until none is left
        total = 0
        while tickets:
            total += nbytes_of(self.unpack(tickets.pop()))
        return total

    def backward_until(self, tensors: Sequence[Any], budget: int) -> int:
        tickets = self.save_group(tensors)  # leak: beyond the budget the loop ends with tickets left
        total = 0
        while tickets and total < budget:
            total += nbytes_of(self.unpack(tickets.pop()))
        return total

    def set_anchor(self, tensor: Any) -> bool:
        """Boundary activation for recomputation; at most one at a time."""
        if self._anchor is not None:
            return False
        self._anchor = self.slots.take(nbytes_of(tensor))  # clean: near miss, never overwritten, drop_anchor gives it back
        if self._anchor is None:
            return False
        self._anchor.content = bytes(tensor)
        return True

    def drop_anchor(self) -> None:
        slot, self._anchor = self._anchor, None
        if slot is not None:
            self.slots.put_back(slot)

    def offload_with_hook(self, tensor: Any) -> bool:
        slot = self.slots.take(nbytes_of(tensor))  # clean: near miss, the hook that is registered puts it back
        if slot is None:
            return False
        slot.content = bytes(tensor)
        self._free_hooks.append(lambda: self.slots.put_back(slot))
        return True

    def run_hooks(self) -> None:
        hooks, self._free_hooks = self._free_hooks, []
        for hook in hooks:
            hook()

    def offload_each(self, tensors: Sequence[Any]) -> int:
        registered = 0
        for tensor in tensors:
            slot = self.slots.take(nbytes_of(tensor))  # leak: the hook is registered once after the loop, so only the last slot is put back
            if slot is None:
                return registered
            slot.content = bytes(tensor)
            registered += 1
        if registered:
            self._free_hooks.append(lambda: self.slots.put_back(slot))
        return registered


def store_pair(slots: HostSlots, key: Any, value: Any, keep: bool) -> Optional[List[HostSlot]]:
    """Both halves or none; the caller has to put back what it is given."""
    pair: List[HostSlot] = []
    for half in (key, value):
        slot = slots.take(nbytes_of(half))  # clean: near miss, put back one by one when a half is missing or not to be kept
        if slot is None:
            break
        slot.content = bytes(half)
        pair.append(slot)
    if len(pair) == 2 and keep:
        return pair
    while pair:
        slots.put_back(pair.pop())
    return None


def measure_pair(slots: HostSlots, key: Any, value: Any) -> int:
    pair = store_pair(slots, key, value, keep=True)  # leak: only the first of the two is put back
    if pair is None:
        return 0
    first, second = pair
    total = nbytes_of(first.content) + nbytes_of(second.content)
    slots.put_back(first)
    return total
