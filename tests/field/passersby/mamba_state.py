"""Recurrent state slots for hybrid SSM/attention models."""
from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

import torch

logger = logging.getLogger(__name__)


class StateSlotAllocator:
    """Slots of conv/ssm state; free slots are kept in an int tensor with a top index."""

    def __init__(self, num_slots: int, conv_shape: Tuple[int, ...], ssm_shape: Tuple[int, ...]) -> None:
        self.conv = torch.zeros(num_slots, *conv_shape)
        self.ssm = torch.zeros(num_slots, *ssm_shape)
        self._free = torch.arange(num_slots)
        self._top = num_slots

    def alloc_slot(self) -> int:
        """-1 when full."""
        if self._top == 0:
            return -1
        self._top -= 1
        return int(self._free[self._top])  # clean: handed to the caller

    def dealloc_slot(self, slot: int) -> None:
        self._free[self._top] = slot
        self._top += 1

    def alloc_batch(self, n: int) -> torch.Tensor:
        n = min(n, self._top)
        self._top -= n
        return self._free[self._top : self._top + n].clone()  # clean: handed to the caller

    def dealloc_batch(self, slots: torch.Tensor) -> None:
        n = slots.numel()
        self._free[self._top : self._top + n] = slots
        self._top += n

    def reset_slot(self, slot: int) -> None:
        self.conv[slot].zero_()
        self.ssm[slot].zero_()


@dataclass
class SeqState:
    seq_id: int
    slot: int = -1
    checkpoint: int = -1


class StateManager:
    def __init__(self, alloc: StateSlotAllocator, allow_checkpoint: bool = True) -> None:
        self.alloc = alloc
        self.allow_checkpoint = allow_checkpoint
        self.seqs: Dict[int, SeqState] = {}

    def add_sequence(self, seq_id: int) -> bool:
        slot = self.alloc.alloc_slot()  # leak: a known sequence returns True with a second slot in hand
        if slot < 0:
            return False
        if seq_id in self.seqs:
            return True
        self.alloc.reset_slot(slot)
        self.seqs[seq_id] = SeqState(seq_id, slot)
        return True

    def add_from_prefix(self, seq_id: int, parent: int) -> bool:
        src = self.seqs[parent]
        if seq_id in self.seqs:
            raise KeyError(f"sequence {seq_id} exists")
        slot = self.alloc.alloc_slot()  # clean: near miss, -1 is no slot, otherwise it is in seqs and remove() frees it
        if slot == -1:
            return False
        self.alloc.conv[slot].copy_(self.alloc.conv[src.slot])
        self.alloc.ssm[slot].copy_(self.alloc.ssm[src.slot])
        self.seqs[seq_id] = SeqState(seq_id, slot)
        return True

    def checkpoint(self, seq_id: int) -> bool:
        if not self.allow_checkpoint:
            return False
        st = self.seqs[seq_id]
        if st.checkpoint < 0:
            st.checkpoint = self.alloc.alloc_slot()  # clean: near miss, only if there is none yet, remove() frees it
        if st.checkpoint < 0:
            return False
        self.alloc.conv[st.checkpoint].copy_(self.alloc.conv[st.slot])
        self.alloc.ssm[st.checkpoint].copy_(self.alloc.ssm[st.slot])
        return True

    def rollback(self, seq_id: int) -> bool:
        st = self.seqs[seq_id]
        if st.checkpoint < 0:
            return False
        self.alloc.dealloc_slot(st.slot)
        st.slot, st.checkpoint = st.checkpoint, -1
        return True

    def relocate(self, seq_id: int) -> bool:
        """Move to a slot with a lower index, helps locality."""
        st = self.seqs[seq_id]
        slot = self.alloc.alloc_slot()  # leak: a slot that is no improvement is not given back
        if slot < 0 or slot > st.slot:
            return False
        self.alloc.conv[slot].copy_(self.alloc.conv[st.slot])
        self.alloc.ssm[slot].copy_(self.alloc.ssm[st.slot])
        self.alloc.dealloc_slot(st.slot)
        st.slot = slot
        return True

    def add_batch(self, ids: List[int]) -> bool:
        slots = self.alloc.alloc_batch(len(ids))  # leak: too few slots are reported, but the ones granted not freed
        if slots.numel() < len(ids):
            logger.debug("batch of %d does not fit", len(ids))
            return False
        for sid, slot in zip(ids, slots.tolist()):
            self.seqs[sid] = SeqState(sid, slot)
        return True

    def run_padding(self, rows: int, fn) -> torch.Tensor:
        slots = self.alloc.alloc_batch(rows)  # clean: near miss, a short batch is freed as well as a full one
        if slots.numel() < rows:
            self.alloc.dealloc_batch(slots)
            raise RuntimeError("no slots for padding rows")
        out = fn(self.alloc.ssm[slots])
        self.alloc.dealloc_batch(slots)
        return out

    def dry_run(self, rows: int, fn) -> Optional[float]:
        slots = self.alloc.alloc_batch(rows)  # leak: the filter keeps even slots only, the odd ones are never freed
        if slots.numel() == 0:
            return None
        slots = slots[slots % 2 == 0]
        val = float(fn(self.alloc.ssm[slots]).mean())
        self.alloc.dealloc_batch(slots)
        return val

    def sorted_run(self, rows: int, fn) -> float:
        slots = self.alloc.alloc_batch(rows)  # clean: near miss, sorting keeps every slot
        slots = slots.sort().values
        val = float(fn(self.alloc.ssm[slots]).mean())
        self.alloc.dealloc_batch(slots)
        return val

    def remove(self, seq_id: int) -> None:
        st = self.seqs.pop(seq_id, None)
        if st is None:
            return
        self.alloc.dealloc_slot(st.slot)
        if st.checkpoint >= 0:
            self.alloc.dealloc_slot(st.checkpoint)
