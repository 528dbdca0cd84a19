"""Activation offload through saved-tensor hooks.

Large activations are packed into slots of a host slab during forward and brought
back during backward.  Slots are tracked in an integer bitmap.
"""
from __future__ import annotations

import contextlib
import enum
import logging
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Union

import torch
from torch.autograd.graph import saved_tensors_hooks

logger = logging.getLogger(__name__)


class SlotMap:
    """Bitmap of slots, one bit per slot, 1 = busy."""

    def __init__(self, nslots: int, slot_bytes: int) -> None:
        self.nslots = nslots
        self.slot_bytes = slot_bytes
        self.slab = torch.empty(nslots, slot_bytes, dtype=torch.uint8, pin_memory=True)
        self._bits = 0

    def seize(self) -> int:
        """First idle slot or -1."""
        for i in range(self.nslots):
            if not self._bits >> i & 1:
                self._bits |= 1 << i
                return i
        return -1

    def seize_run(self, count: int) -> List[int]:
        """`count` slots, not necessarily contiguous; an empty list if there are too few."""
        got: List[int] = []
        while len(got) < count:
            i = self.seize()  # leak: when the map runs out those already seized are forgotten
            if i < 0:
                return []
            got.append(i)
        return got

    def seize_pair(self) -> Optional[List[int]]:
        a = self.seize()  # clean: near miss, freed when there is no second, else handed to the caller
        b = self.seize()  # clean: near miss, freed only if it was got, else handed to the caller
        if a < 0 or b < 0:
            if a >= 0:
                self.free(a)
            if b >= 0:
                self.free(b)
            return None
        return [a, b]

    def free(self, i: int) -> None:
        self._bits &= ~(1 << i)

    def busy(self) -> int:
        return bin(self._bits).count("1")

    def view(self, i: int, nbytes: int) -> torch.Tensor:
        return self.slab[i, :nbytes]


class Mode(enum.Enum):
    KEEP = 0
    OFFLOAD = 1
    DROP = 2


class Packed(NamedTuple):
    slot: int
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device


Saved = Union[torch.Tensor, Packed]


class OffloadSession:
    def __init__(self, slots: SlotMap, min_bytes: int = 1 << 20, policy: Optional[Callable[[torch.Tensor], Mode]] = None) -> None:
        self.slots = slots
        self.min_bytes = min_bytes
        self.policy = policy
        self._open: Dict[int, int] = {}
        self.missed = 0

    def pack(self, t: torch.Tensor) -> Saved:
        nbytes = t.numel() * t.element_size()
        if nbytes < self.min_bytes or nbytes > self.slots.slot_bytes:
            return t
        slot = self.slots.seize()  # clean: -1 is no slot, and else listed in _open, which unpack() and end_step() free
        if slot < 0:
            self.missed += 1
            return t
        self.slots.view(slot, nbytes).copy_(t.contiguous().view(torch.uint8).flatten())
        self._open[slot] = nbytes
        return Packed(slot, t.dtype, t.shape, t.device)

    def unpack(self, p: Saved) -> torch.Tensor:
        if isinstance(p, torch.Tensor):
            return p
        nbytes = self._open.pop(p.slot)
        out = self.slots.view(p.slot, nbytes).to(p.device)
        self.slots.free(p.slot)
        return out.view(p.dtype).view(p.shape)

    def end_step(self) -> None:
        """Frees what backward did not ask for (unused outputs, no_grad branches)."""
        for slot in list(self._open):
            self.slots.free(slot)
        self._open.clear()

    @contextlib.contextmanager
    def step(self):
        try:
            with saved_tensors_hooks(self.pack, self.unpack):
                yield self
        finally:
            self.end_step()

    # -- explicit use by checkpointed blocks ------------------------------

    def stash(self, t: torch.Tensor) -> Optional[Packed]:
        slot = self.slots.seize()  # leak: a tensor dropped by the policy returns None with the slot seized
        if slot < 0:
            return None
        mode = self.policy(t) if self.policy is not None else Mode.OFFLOAD
        if mode is Mode.DROP:
            return None
        nbytes = t.numel() * t.element_size()
        self.slots.view(slot, nbytes).copy_(t.contiguous().view(torch.uint8).flatten())
        return Packed(slot, t.dtype, t.shape, t.device)

    def restore(self, p: Packed) -> torch.Tensor:
        n = p.shape.numel() * torch.empty((), dtype=p.dtype).element_size()
        out = self.slots.view(p.slot, n).to(p.device)
        self.slots.free(p.slot)
        return out.view(p.dtype).view(p.shape)

    def probe_bandwidth(self, t: torch.Tensor, rounds: int) -> float:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(rounds):
            p = self.stash(t)  # clean: restore() frees it
            if p is None:
                break
            self.restore(p)
        end.record()
        end.synchronize()
        return rounds * t.numel() * t.element_size() / max(start.elapsed_time(end), 1e-6)


class SlotGuard:
    """A slot for the length of a with block; `keep()` hands it to someone else."""

    def __init__(self, slots: SlotMap) -> None:
        self._slots = slots
        self.index = -1
        self._kept = False

    def __enter__(self) -> "SlotGuard":
        self.index = self._slots.seize()  # clean: near miss, freed by __exit__ unless it was handed on by keep()
        return self

    def keep(self) -> int:
        self._kept = True
        return self.index

    def __exit__(self, *exc: Any) -> None:
        if self.index >= 0 and not self._kept:
            self._slots.free(self.index)


class RecomputeBlock(torch.nn.Module):
    """Keeps only its inputs, in the slab, and runs forward again for backward."""

    def __init__(self, fn: torch.nn.Module, session: OffloadSession) -> None:
        super().__init__()
        self.fn = fn
        self.session = session
        self._inputs: List[Packed] = []
        self._mask: Optional[Packed] = None

    def save(self, xs: List[torch.Tensor]) -> bool:
        packed: List[Packed] = []
        for x in xs:
            p = self.session.stash(x)  # clean: near miss, all freed if one fails, else moved to _inputs, which replay() restores
            if p is None:
                for q in packed:
                    self.session.slots.free(q.slot)
                return False
            packed.append(p)
        self._inputs.extend(packed)
        return True

    def save_mask(self, mask: torch.Tensor) -> None:
        self._mask = self.session.stash(mask)  # leak: replay() without gradients drops the mask unrestored

    def replay(self) -> List[torch.Tensor]:
        xs = [self.session.restore(p) for p in self._inputs]
        self._inputs.clear()
        if torch.is_grad_enabled() and self._mask is not None:
            xs.append(self.session.restore(self._mask))
        self._mask = None
        return xs

    def run_hosted(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        with SlotGuard(self.session.slots) as g:  # clean: context manager
            if g.index < 0:
                return None
            n = x.numel() * x.element_size()
            host = self.session.slots.view(g.index, n)
            host.copy_(x.contiguous().view(torch.uint8).flatten())
            return self.fn(host.to(x.device).view(x.dtype).view(x.shape))

    def prestage(self, x: torch.Tensor) -> Optional[int]:
        with SlotGuard(self.session.slots) as g:  # clean: near miss, keep() hands the slot to the caller
            n = x.numel() * x.element_size()
            if g.index < 0 or n > self.session.slots.slot_bytes:
                return None
            self.session.slots.view(g.index, n).copy_(x.contiguous().view(torch.uint8).flatten())
            return g.keep()

    def prestage_all(self, xs: List[torch.Tensor]) -> int:
        done = 0
        for x in xs:
            slot = self.prestage(x)  # leak: the slot index is only counted and then overwritten
            if slot is None:
                break
            done += 1
        return done


def paired_copy(slots: SlotMap, k: torch.Tensor, v: torch.Tensor) -> Optional[torch.Tensor]:
    pair = slots.seize_pair()  # leak: not freed when k and v differ in size
    if pair is None:
        return None
    n = k.numel() * k.element_size()
    if v.numel() * v.element_size() != n:
        logger.error("k/v size mismatch")
        return None
    for i, t in zip(pair, (k, v)):
        slots.view(i, n).copy_(t.contiguous().view(torch.uint8).flatten())
    out = torch.stack([slots.view(i, n).clone() for i in pair])
    for i in pair:
        slots.free(i)
    return out


def striped(slots: SlotMap, blob: torch.Tensor) -> torch.Tensor:
    need = -(-blob.numel() // slots.slot_bytes)
    run = slots.seize_run(need)  # clean: empty means none was handed out, else all freed in finally
    try:
        for k, i in enumerate(run):
            part = blob[k * slots.slot_bytes : (k + 1) * slots.slot_bytes]
            slots.view(i, part.numel()).copy_(part)
        return torch.cat([slots.view(i, slots.slot_bytes).clone() for i in run])[: blob.numel()] if run else blob.clone()
    finally:
        for i in run:
            slots.free(i)
