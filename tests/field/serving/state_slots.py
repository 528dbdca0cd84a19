"""Recurrent (SSM) state slots. Unlike KV pages a sequence owns exactly one of them."""
from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Iterator, Optional, Sequence

import torch
from torch import Tensor


@dataclass
class SSMConfig:
    n_layers: int = 4
    d_state: int = 16
    max_slots: int = 64
    snapshot: bool = False


class StatePool:
    def __init__(self, cfg: SSMConfig) -> None:
        self.cfg = cfg
        self.conv = torch.zeros(cfg.n_layers, cfg.max_slots, cfg.d_state)
        self.ssm = torch.zeros_like(self.conv)
        self._stack = list(reversed(range(cfg.max_slots)))

    def __len__(self) -> int:
        return len(self._stack)

    def acquire_slot(self) -> int:
        slot = self._stack.pop()
        self.conv[:, slot].zero_()
        self.ssm[:, slot].zero_()
        return slot

    def release_slot(self, slot: int) -> None:
        self._stack.append(slot)

    @contextmanager
    def scratch(self) -> Iterator[int]:
        slot = self.acquire_slot()  # clean: released after the yield
        try:
            yield slot
        finally:
            self.release_slot(slot)

    @contextmanager
    def scratch_checked(self, want: int) -> Iterator[int]:
        slot = self.acquire_slot()  # leak: raises between the acquire and the try when too few remain
        if len(self) < want:
            raise RuntimeError("state pool nearly empty")
        try:
            yield slot
        finally:
            self.release_slot(slot)


class SequenceState:
    def __init__(self, pool: StatePool, seq_id: int) -> None:
        self.pool = pool
        self.seq_id = seq_id
        self.slot = pool.acquire_slot()  # clean: close releases it
        self.snap: Optional[int] = None

    def take_snapshot(self) -> None:
        if self.snap is None:
            self.snap = self.pool.acquire_slot()  # clean: only when there is none, close releases it
        self.pool.ssm[:, self.snap] = self.pool.ssm[:, self.slot]
        self.pool.conv[:, self.snap] = self.pool.conv[:, self.slot]

    def rollback(self) -> None:
        if self.snap is None:
            return
        self.pool.release_slot(self.slot)
        self.slot = self.snap
        self.snap = None

    def close(self) -> None:
        self.pool.release_slot(self.slot)
        if self.snap is not None:
            self.pool.release_slot(self.snap)
            self.snap = None


class BranchState:
    def __init__(self, pool: StatePool) -> None:
        self.pool = pool
        self.main = pool.acquire_slot()  # clean: released in close
        self.alt = pool.acquire_slot()  # leak: close forgets this one

    def blend(self, w: float) -> Tensor:
        return torch.lerp(self.pool.ssm[:, self.main], self.pool.ssm[:, self.alt], w)

    def close(self) -> None:
        self.pool.release_slot(self.main)


class StateRunner:
    def __init__(self, pool: StatePool) -> None:
        self.pool = pool
        self.states: dict[int, SequenceState] = {}

    def begin(self, seq_id: int) -> SequenceState:
        st = self.states.get(seq_id)
        if st is None:
            st = self.states[seq_id] = SequenceState(self.pool, seq_id)  # clean: in the table until end
        return st

    def end(self, seq_id: int) -> None:
        self.states.pop(seq_id).close()

    def score(self, prompts: Sequence[Tensor]) -> list[float]:
        res = []
        for p in prompts:
            st = SequenceState(self.pool, -1)  # leak: an empty prompt continues without a close
            if p.numel() == 0:
                res.append(0.0)
                continue
            self.pool.ssm[:, st.slot] += p.float().mean()
            res.append(float(self.pool.ssm[:, st.slot].sum()))
            st.close()
        return res

    def compare(self, w: float) -> Tensor:
        br = BranchState(self.pool)  # clean: closed here, what close forgets is judged at the field
        out = br.blend(w)
        br.close()
        return out

    def dry_run(self, x: Tensor) -> Tensor:
        with self.pool.scratch() as slot:  # clean: with statement
            self.pool.ssm[:, slot] += x
            return self.pool.ssm[:, slot].clone()

    def dry_run_checked(self, x: Tensor) -> Tensor:
        with self.pool.scratch_checked(2) as slot:  # clean: with statement
            self.pool.conv[:, slot] += x
            return self.pool.conv[:, slot].clone()

    def clone_state(self, seq_id: int, new_id: int) -> bool:
        if len(self.pool) == 0 or new_id in self.states:
            return False
        dup = SequenceState(self.pool, new_id)  # clean: near miss, closed when there is no source
        src = self.states.get(seq_id)
        if src is None:
            dup.close()
            return False
        self.pool.ssm[:, dup.slot] = self.pool.ssm[:, src.slot]
        self.states[new_id] = dup
        return True

    def prefill_split(self, x: Tensor, parts: int) -> Tensor:
        slots = [self.pool.acquire_slot() for _ in range(parts)]  # leak: the first slot is kept out of the release
        for s, chunk in zip(slots, x.chunk(parts)):
            self.pool.ssm[:, s] += chunk.mean()
        out = self.pool.ssm[:, slots[0]].clone()
        for s in slots[1:]:
            out += self.pool.ssm[:, s]
            self.pool.release_slot(s)
        return out
