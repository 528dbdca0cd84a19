"""Saved-tensor hooks that offload activations into host slots between forward and backward."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional, Union

import torch


class HostSlots:
    def __init__(self, count: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._arena = torch.empty(count * slot_bytes, dtype=torch.uint8, pin_memory=True)
        self._free: list[int] = list(range(count))

    def reserve(self) -> int:
        if not self._free:
            return -1
        return self._free.pop()

    def reserve_run(self, n: int) -> Optional[list[int]]:
        if len(self._free) < n:
            return None
        return [self._free.pop() for _ in range(n)]

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def release_all(self, slots: list[int]) -> None:
        self._free.extend(slots)

    def view(self, slot: int, like: torch.Tensor) -> torch.Tensor:
        lo = slot * self.slot_bytes
        need = like.numel() * like.element_size()
        return self._arena[lo : lo + need].view(like.dtype).view(like.shape)

    def view_meta(self, slot: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        lo = slot * self.slot_bytes
        need = shape.numel() * dtype.itemsize
        return self._arena[lo : lo + need].view(dtype).view(shape)


@dataclass
class Ticket:
    slot: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass
class SplitTicket:
    slots: list[int]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


Packed = Union[torch.Tensor, Ticket, SplitTicket]


class ActivationOffloader:
    def __init__(self, slots: HostSlots, min_numel: int = 4096) -> None:
        self.slots = slots
        self.min_numel = min_numel
        self._by_layer: dict[int, list[Ticket]] = {}
        self._anchor: dict[str, int] = {}
        self._layer = 0

    def fits(self, t: torch.Tensor) -> bool:
        return t.numel() * t.element_size() <= self.slots.slot_bytes

    def pack(self, t: torch.Tensor) -> Packed:
        if t.numel() < self.min_numel or not t.is_cuda:
            return t
        if not self.fits(t):
            return self._pack_split(t)  # clean: the split ticket goes to autograd and unpack releases its slots
        slot = self.slots.reserve()  # leak: a parameter view is returned as it is although a slot was reserved for it
        if slot < 0:
            return t
        if t._base is not None and isinstance(t._base, torch.nn.Parameter):
            return t
        self.slots.view(slot, t).copy_(t, non_blocking=True)
        ticket = Ticket(slot, t.shape, t.dtype, t.device)
        return ticket

    def _pack_split(self, t: torch.Tensor) -> Packed:
        chunks = t.reshape(-1).split(self.slots.slot_bytes // t.element_size())
        run = self.slots.reserve_run(len(chunks))  # clean: moved into the split ticket
        if run is None:
            return t
        for slot, c in zip(run, chunks):
            self.slots.view(slot, c).copy_(c, non_blocking=True)
        return SplitTicket(run, t.shape, t.dtype, t.device)

    def unpack(self, packed: Packed) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        if isinstance(packed, SplitTicket):
            return self._unpack_split(packed)
        host = self.slots.view_meta(packed.slot, packed.shape, packed.dtype)
        out = host.to(packed.device)
        self.slots.release(packed.slot)
        return out

    def _unpack_split(self, ticket: SplitTicket) -> torch.Tensor:
        per = self.slots.slot_bytes // ticket.dtype.itemsize
        left = ticket.shape.numel()
        parts = []
        for slot in ticket.slots:
            n = min(per, left)
            parts.append(self.slots.view_meta(slot, torch.Size([n]), ticket.dtype).to(ticket.device))
            left -= n
        self.slots.release_all(ticket.slots)
        return torch.cat(parts).view(ticket.shape)

    def offload_layer(self, outputs: list[torch.Tensor]) -> int:
        layer = self._layer
        self._layer += 1
        tickets = self._by_layer.setdefault(layer, [])
        for t in outputs:
            if not self.fits(t):
                continue
            slot = self.slots.reserve()  # clean: near miss, the ticket list in _by_layer keeps it and reload_layer or reset releases
            if slot < 0:
                break
            self.slots.view(slot, t).copy_(t)
            tickets.append(Ticket(slot, t.shape, t.dtype, t.device))
        return layer

    def reload_layer(self, layer: int) -> list[torch.Tensor]:
        out = []
        for tk in self._by_layer.pop(layer, []):
            out.append(self.slots.view_meta(tk.slot, tk.shape, tk.dtype).to(tk.device))
            self.slots.release(tk.slot)
        return out

    def pin_anchor(self, name: str, t: torch.Tensor) -> bool:
        slot = self.slots.reserve()  # leak: a name pinned for the second time overwrites the slot of the first
        if slot < 0:
            return False
        self.slots.view(slot, t).copy_(t)
        self._anchor[name] = slot
        return True

    def swap_anchor(self, name: str, t: torch.Tensor) -> bool:
        slot = self.slots.reserve()  # clean: near miss, the old slot of the name is released after the swap
        if slot < 0:
            return False
        self.slots.view(slot, t).copy_(t)
        old = self._anchor.get(name)
        self._anchor[name] = slot
        if old is not None:
            self.slots.release(old)
        return True

    def reset(self) -> None:
        for tickets in self._by_layer.values():
            self.slots.release_all([t.slot for t in tickets])
        self._by_layer.clear()
        for slot in self._anchor.values():
            self.slots.release(slot)
        self._anchor.clear()
        self._layer = 0


class OffloadScope:
    def __init__(self, off: ActivationOffloader, lookahead: int) -> None:
        self.off = off
        self.lookahead = lookahead
        self._spare: list[int] = []

    def __enter__(self) -> "OffloadScope":
        run = self.off.slots.reserve_run(self.lookahead)  # leak: __exit__ returns early upon an out-of-memory error and the spare slots stay out
        self._spare = run or []
        return self

    def __exit__(self, exc_type: Any, exc: Any, tb: Any) -> bool:
        if exc_type is not None and issubclass(exc_type, torch.cuda.OutOfMemoryError):
            self.off.reset()
            return True
        self.off.slots.release_all(self._spare)
        self._spare = []
        return False

    def stage(self, t: torch.Tensor) -> Optional[torch.Tensor]:
        if not self._spare:
            return None
        view = self.off.slots.view(self._spare[-1], t)
        view.copy_(t)
        return view


def run_with_offload(model: torch.nn.Module, batch: torch.Tensor, off: ActivationOffloader) -> torch.Tensor:
    with OffloadScope(off, 2) as scope:
        scope.stage(batch)
        with torch.autograd.graph.saved_tensors_hooks(off.pack, off.unpack):
            loss = model(batch).mean()
        loss.backward()
        return loss.detach()
    return batch.new_zeros(())


def probe_bandwidth(slots: HostSlots, t: torch.Tensor, rounds: int) -> Optional[float]:
    slot = slots.reserve()  # clean: near miss, early return for zero rounds comes after the release
    if slot < 0:
        return None
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(rounds):
        slots.view(slot, t).copy_(t, non_blocking=True)
    end.record()
    end.synchronize()
    slots.release(slot)
    if rounds == 0:
        return None
    return rounds * t.numel() * t.element_size() / start.elapsed_time(end)


def spill_gradients(slots: HostSlots, params: list[torch.nn.Parameter]) -> Optional[dict[int, int]]:
    placed: dict[int, int] = {}
    for i, p in enumerate(params):
        if p.grad is None:
            continue
        slot = slots.reserve()  # leak: running out of slots returns None and the slots placed so far are lost
        if slot < 0:
            return None
        slots.view(slot, p.grad).copy_(p.grad)
        placed[i] = slot
    return placed


def restore_gradients(slots: HostSlots, params: list[torch.nn.Parameter], placed: dict[int, int]) -> None:
    for i, slot in placed.items():
        g = params[i].grad
        g.copy_(slots.view(slot, g))
        slots.release(slot)


def accumulate_on_host(slots: HostSlots, params: list[torch.nn.Parameter], step_fn) -> bool:
    placed = spill_gradients(slots, params)  # clean: restore_gradients releases every slot of the dict
    if placed is None:
        return False
    step_fn()
    restore_gradients(slots, params, placed)
    return True
