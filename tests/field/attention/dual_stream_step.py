"""Overlap of attention and MLP on two micro-batches, with events and ping-pong buffers."""
from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import Any, Dict, Generator, List, Optional, Sequence, Tuple

import torch
from torch import nn

logger = logging.getLogger(__name__)


class EventPool:
    def __init__(self) -> None:
        self._events: List[Any] = []
        self.made = 0

    def fetch_event(self) -> Any:
        if self._events:
            return self._events.pop()
        self.made += 1
        return torch.cuda.Event() if torch.cuda.is_available() else object()

    def restore_event(self, ev: Any) -> None:
        self._events.append(ev)


class PingPong:
    """Two buffers per size; borrow blocks nothing, it fails."""

    def __init__(self, numel: int) -> None:
        self._b = [torch.empty(numel), torch.empty(numel)]
        self._held = [False, False]

    def borrow(self) -> Tuple[int, torch.Tensor]:
        for i in (0, 1):
            if not self._held[i]:
                self._held[i] = True
                return i, self._b[i]
        raise RuntimeError("both buffers are held")

    def give_back(self, i: int) -> None:
        self._held[i] = False

    @contextmanager
    def held(self) -> Generator[torch.Tensor, None, None]:
        i, b = self.borrow()  # clean: the finally gives it back
        try:
            yield b
        finally:
            self.give_back(i)

    @contextmanager
    def held_unless(self, skip: bool) -> Generator[Optional[torch.Tensor], None, None]:
        i, b = self.borrow()  # leak: with skip the generator ends after None without giving back
        if skip:
            yield None
            return
        try:
            yield b
        finally:
            self.give_back(i)


class DualStreamBlock(nn.Module):
    def __init__(self, dim: int, events: EventPool, pp: PingPong) -> None:
        super().__init__()
        self.attn = nn.Linear(dim, dim)
        self.mlp = nn.Linear(dim, dim)
        self.events = events
        self.pp = pp
        self.open_events: List[Any] = []
        self.marks: Dict[str, Any] = {}

    def _record(self) -> Any:
        ev = self.events.fetch_event()  # clean: handed to the caller
        if hasattr(ev, "record"):
            ev.record()
        return ev

    def _wait(self, ev: Any) -> None:
        if hasattr(ev, "wait"):
            ev.wait()

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        ya = self.attn(a)
        ev = self._record()  # clean: restored after the wait
        yb = self.attn(b)
        self._wait(ev)
        self.events.restore_event(ev)
        return self.mlp(ya), self.mlp(yb)

    def forward_chain(self, xs: Sequence[torch.Tensor]) -> List[torch.Tensor]:
        outs: List[torch.Tensor] = []
        prev: Optional[Any] = None
        for x in xs:
            y = self.attn(x)
            if prev is not None:
                self._wait(prev)
            prev = self._record()  # leak: the waited event is overwritten by the new one
            outs.append(self.mlp(y))
        if prev is not None:
            self.events.restore_event(prev)
        return outs

    def forward_chain_restored(self, xs: Sequence[torch.Tensor]) -> List[torch.Tensor]:
        outs: List[torch.Tensor] = []
        prev: Optional[Any] = None
        for x in xs:
            y = self.attn(x)
            if prev is not None:
                self._wait(prev)
                self.events.restore_event(prev)
            prev = self._record()  # clean: near miss, the waited one was restored before it lost its name
            outs.append(self.mlp(y))
        if prev is not None:
            self.events.restore_event(prev)
        return outs

    def launch(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attn(x)
        self.open_events.append(self._record())  # clean: synchronize restores the list
        return y

    def synchronize(self) -> None:
        for ev in self.open_events:
            self._wait(ev)
            self.events.restore_event(ev)
        self.open_events = []

    def mark(self, name: str) -> None:
        if name in self.marks:
            raise KeyError(name)
        self.marks[name] = self._record()  # leak: reset_marks clears the table and restores none

    def reset_marks(self) -> None:
        for ev in self.marks.values():
            self._wait(ev)
        self.marks.clear()

    def staged(self, x: torch.Tensor) -> torch.Tensor:
        with self.pp.held() as buf:  # clean: with statement
            buf[: x.numel()].copy_(x.flatten())
            return self.mlp(buf[: x.numel()].view_as(x))

    def swap(self, x: torch.Tensor, y: torch.Tensor) -> None:
        i, bx = self.pp.borrow()  # clean: given back at the end
        j, by = self.pp.borrow()  # clean: given back at the end
        bx[: x.numel()].copy_(x.flatten())
        by[: y.numel()].copy_(y.flatten())
        x.copy_(by[: x.numel()].view_as(x))
        y.copy_(bx[: y.numel()].view_as(y))
        for idx in (j, i):
            self.pp.give_back(idx)

    def add_staged(self, x: torch.Tensor) -> torch.Tensor:
        i, buf = self.pp.borrow()  # leak: the loop variable overwrites the index, so the other buffer may be given back instead
        acc = torch.zeros_like(x)
        for i, row in enumerate(x):
            buf[: row.numel()].copy_(row)
            acc[i] = buf[: row.numel()] + row
        self.pp.give_back(i % 2)
        return acc

    def peak(self, x: torch.Tensor) -> float:
        try:
            i, buf = self.pp.borrow()  # clean: near miss, the handler is only met without a lease
        except RuntimeError:
            return float(x.max())
        buf[: x.numel()].copy_(x.flatten())
        m = float(buf[: x.numel()].max())
        self.pp.give_back(i)
        return m
