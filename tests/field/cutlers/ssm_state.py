"""Recurrent-state slots for Mamba-style layers (conv + ssm state per sequence)."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Optional

try:
    import torch
except ImportError:
    torch = None


class StateSlab:
    """Rows of the state tensor. claim_row() / yield_row()."""

    def __init__(self, rows: int, width: int) -> None:
        self.width = width
        if torch is not None:
            self.data = torch.zeros(rows, width)
        else:
            self.data = [[0.0] * width for _ in range(rows)]
        self._vacant = list(range(rows))

    def claim_row(self) -> int:
        """Row index, or -1 when the slab is full."""
        return self._vacant.pop() if self._vacant else -1

    def yield_row(self, row: int) -> None:
        self._vacant.append(row)

    @property
    def vacant(self) -> int:
        return len(self._vacant)

    def copy_row(self, src: int, dst: int) -> None:
        for i in range(self.width):
            self.data[dst][i] = self.data[src][i]


@dataclass(eq=False)
class StateRef:
    slab: StateSlab
    row: int
    owned: bool = True

    def close(self) -> None:
        if self.owned:
            self.slab.yield_row(self.row)
            self.owned = False


@dataclass(eq=False)
class SeqState:
    seq_id: int
    ref: Optional[StateRef] = None
    snapshot: int = -1
    parent: Optional["SeqState"] = None


class StateManager:
    def __init__(self, slab: StateSlab, speculative: bool = False, keep_checkpoints: bool = False) -> None:
        self.slab = slab
        self.speculative = speculative
        self.keep_checkpoints = keep_checkpoints
        self.by_seq: dict[int, StateRef] = {}
        self.ckpt: dict[int, int] = {}

    def open(self, seq: SeqState) -> bool:
        if seq.ref is not None:
            return True
        row = self.slab.claim_row()  # clean: near miss, -1 is no row; else owned by the ref, close_seq gives it back
        if row < 0:
            return False
        seq.ref = StateRef(self.slab, row)
        self.by_seq[seq.seq_id] = seq.ref
        return True

    def share(self, seq: SeqState, parent: SeqState) -> None:
        self.close_seq(seq)
        seq.parent = parent
        seq.ref = StateRef(self.slab, parent.ref.row, owned=False)
        self.by_seq[seq.seq_id] = seq.ref

    def detach(self, seq: SeqState) -> bool:
        """Give a sharing sequence a row of its own before it is written."""
        if seq.ref.owned:
            return True
        row = self.slab.claim_row()  # clean: near miss, replaces a ref that owns nothing and is owned itself
        if row < 0:
            return False
        self.slab.copy_row(seq.ref.row, row)
        seq.ref = StateRef(self.slab, row, owned=True)
        self.by_seq[seq.seq_id] = seq.ref
        return True

    def detach_lazy(self, seq: SeqState, steps: int) -> bool:
        row = self.slab.claim_row()  # leak: the ref keeps owned=False whenever steps is zero, so close passes the row by
        if row < 0:
            return False
        if seq.ref.owned:
            self.slab.yield_row(row)
            return True
        self.slab.copy_row(seq.ref.row, row)
        seq.ref = StateRef(self.slab, row, owned=steps > 0)
        self.by_seq[seq.seq_id] = seq.ref
        return True

    def before_draft(self, seq: SeqState) -> None:
        if self.speculative:
            seq.snapshot = self.slab.claim_row()  # clean: near miss, after_draft gives it back under the same flag
            if seq.snapshot >= 0:
                self.slab.copy_row(seq.ref.row, seq.snapshot)

    def after_draft(self, seq: SeqState, rejected: bool) -> None:
        if not self.speculative or seq.snapshot < 0:
            return
        if rejected:
            self.slab.copy_row(seq.snapshot, seq.ref.row)
        self.slab.yield_row(seq.snapshot)
        seq.snapshot = -1

    def checkpoint(self, seq: SeqState) -> bool:
        row = self.slab.claim_row()  # leak: rollback gives it back, but drop_checkpoint does so only with keep_checkpoints off
        if row < 0:
            return False
        old = self.ckpt.pop(seq.seq_id, None)
        if old is not None:
            self.slab.yield_row(old)
        self.slab.copy_row(seq.ref.row, row)
        self.ckpt[seq.seq_id] = row
        return True

    def rollback(self, seq: SeqState) -> bool:
        row = self.ckpt.pop(seq.seq_id, None)
        if row is None:
            return False
        self.slab.copy_row(row, seq.ref.row)
        self.slab.yield_row(row)
        return True

    def drop_checkpoint(self, seq: SeqState) -> None:
        row = self.ckpt.pop(seq.seq_id, None)
        if row is not None and not self.keep_checkpoints:
            self.slab.yield_row(row)

    def close_seq(self, seq: SeqState) -> None:
        self.after_draft(seq, rejected=False)
        ref = self.by_seq.pop(seq.seq_id, None)
        if ref is not None:
            ref.close()
        self.drop_checkpoint(seq)
        seq.ref = None

    def trial(self, seq: SeqState, deltas: Iterable[float], commit: bool) -> float:
        row = seq.ref.row
        scratch = None
        if not commit:
            scratch = self.slab.claim_row()  # clean: near miss, claimed and given back under the same unchanged flag
            if scratch < 0:
                return 0.0
            self.slab.copy_row(row, scratch)
        target = row if commit else scratch
        for d in deltas:
            self.slab.data[target][0] += d
        out = float(self.slab.data[target][0])
        if not commit:
            self.slab.yield_row(scratch)
        return out
