"""Recurrent-state cache for SSM layers: every running request owns one state index."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

import torch
import torch.nn as nn


@dataclass
class StateIndex:
    value: int
    fresh: bool = True


@dataclass
class RequestState:
    rid: str
    index: Optional[StateIndex] = None
    checkpoints: list[StateIndex] = field(default_factory=list)
    length: int = 0


class StateCache:
    """`_top` points into a tensor used as the stack of unused indices."""

    def __init__(self, layers: int, count: int, dim: int) -> None:
        self.states = torch.zeros(layers, count, dim)
        self._stack = torch.arange(count, dtype=torch.int32)
        self._top = count

    def new_index(self) -> StateIndex:
        if self._top == 0:
            raise MemoryError("state cache full")
        self._top -= 1  # clean: the index on the former top goes to the caller
        return StateIndex(int(self._stack[self._top]))

    def new_indices(self, count: int) -> torch.Tensor:
        if self._top < count:
            return torch.empty(0, dtype=torch.int32)
        self._top -= count  # clean: the slice is cloned for the caller
        return self._stack[self._top:self._top + count].clone()

    def free_index(self, idx: StateIndex) -> None:
        self.states[:, idx.value].zero_()
        self._stack[self._top] = idx.value
        self._top += 1

    def free_indices(self, rows: torch.Tensor) -> None:
        n = rows.numel()
        self._stack[self._top:self._top + n] = rows
        self._top += n

    @property
    def unused(self) -> int:
        return self._top


class StateManager:
    def __init__(self, cache: StateCache, every: int) -> None:
        self.cache = cache
        self.every = every
        self.requests: dict[str, RequestState] = {}

    def attach(self, rid: str) -> RequestState:
        if rid in self.requests:
            return self.requests[rid]
        st = RequestState(rid, self.cache.new_index())  # clean: in the request table until detach
        self.requests[rid] = st
        return st

    def attach_from(self, rid: str, source: str) -> Optional[RequestState]:
        """Start from another request's state (shared system prompt)."""
        if rid in self.requests:
            return None
        idx = self.cache.new_index()  # leak: an unknown source returns None and the index is gone
        src = self.requests.get(source)
        if src is None or src.index is None:
            return None
        self.cache.states[:, idx.value] = self.cache.states[:, src.index.value]
        st = RequestState(rid, idx, length=src.length)
        self.requests[rid] = st
        return st

    def checkpoint(self, st: RequestState) -> bool:
        if st.index is None or st.length % self.every:
            return False
        idx = self.cache.new_index()  # clean: in the checkpoints, rollback and detach free them
        self.cache.states[:, idx.value] = self.cache.states[:, st.index.value]
        st.checkpoints.append(idx)
        return True

    def rollback(self, st: RequestState) -> bool:
        if not st.checkpoints:
            return False
        last = st.checkpoints.pop()
        if st.index is not None:
            self.cache.free_index(st.index)
        st.index = last
        return True

    def restart(self, st: RequestState) -> None:
        st.index = self.cache.new_index()  # leak: the running index is overwritten
        st.length = 0

    def restart_clean(self, st: RequestState) -> None:
        if st.index is not None:
            self.cache.free_index(st.index)
            st.index = None
        st.index = self.cache.new_index()  # clean: near miss, the field was emptied first
        st.length = 0

    def detach(self, rid: str) -> None:
        st = self.requests.pop(rid, None)
        if st is None:
            return
        if st.index is not None:
            self.cache.free_index(st.index)
        for idx in st.checkpoints:
            self.cache.free_index(idx)
        st.checkpoints.clear()
        st.index = None


class SSMBlock(nn.Module):
    def __init__(self, dim: int, cache: StateCache, layer: int) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.ones(dim))
        self.cache = cache
        self.layer = layer

    def scan(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.cache.new_indices(x.shape[0])  # leak: a sequence of length zero returns before the rows are freed
        if rows.numel() == 0:
            return x.cumsum(1)
        if x.shape[1] == 0:
            return x.sum(1)
        st = self.cache.states[self.layer]
        for t in range(x.shape[1]):
            st[rows.long()] = st[rows.long()] * self.decay + x[:, t]
        y = st[rows.long()].clone()
        self.cache.free_indices(rows)
        return y

    def scan_masked(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows = self.cache.new_indices(x.shape[0])  # leak: only the rows with a mask are freed, the padded ones stay out
        if rows.numel() == 0:
            return x.cumsum(1)
        live = rows[mask.any(1)]
        st = self.cache.states[self.layer]
        st[live.long()] = st[live.long()] * self.decay + x[mask.any(1)].sum(1)
        y = st[rows.long()].clone()
        self.cache.free_indices(live)
        return y


def warmup(manager: StateManager, steps: int) -> int:
    held: list[StateIndex] = []
    for _ in range(steps):
        try:
            held.append(manager.cache.new_index())  # clean: near miss, full ends the loop and all held are freed
        except MemoryError:
            break
    for idx in held:
        manager.cache.free_index(idx)
    return len(held)


def probe_layer(cache: StateCache, layer: int) -> float:
    idx = cache.new_index()  # leak: a layer out of range returns without freeing
    if layer >= cache.states.shape[0]:
        return -1.0
    value = float(cache.states[layer, idx.value].norm())
    cache.free_index(idx)
    return value


def reserve_tail(cache: StateCache, frac: float) -> torch.Tensor:
    want = int(cache.unused * frac)
    rows = cache.new_indices(want)  # clean: near miss, the odd rows go back and the even are the caller's
    cache.free_indices(rows[1::2])
    return rows[::2]
