"""Layer weights streamed from host memory through device buffers, with one layer of look-ahead."""
from __future__ import annotations

import logging
from typing import Iterator, Sequence

import torch
from torch import nn

log = logging.getLogger(__name__)


class DeviceArena:
    """Equal buffers on the device by bitmap; lend() gives the tensor, and its address tells retire() which it was."""

    def __init__(self, count: int, numel: int, device: str = "cpu") -> None:
        self._base = torch.empty(count, numel, device=device)
        self._mask = (1 << count) - 1
        self._stride = numel * self._base.element_size()

    def lend(self) -> torch.Tensor | None:
        if self._mask == 0:
            return None
        low = self._mask & -self._mask
        self._mask ^= low
        return self._base[low.bit_length() - 1]

    def retire(self, buf: torch.Tensor) -> None:
        i = (buf.data_ptr() - self._base.data_ptr()) // self._stride
        self._mask |= 1 << i

    def must_lend(self) -> torch.Tensor:
        buf = self.lend()  # clean: returned to the caller
        if buf is None:
            raise MemoryError("device arena is empty")
        return buf

    def lend_loaded(self, host: torch.Tensor) -> torch.Tensor | None:
        buf = self.lend()  # clean: retired when the tensor does not fit
        if buf is None:
            return None
        if host.numel() > buf.numel():
            self.retire(buf)
            return None
        buf[: host.numel()].copy_(host.flatten())
        return buf


class LayerStream:
    def __init__(self, arena: DeviceArena, layers: Sequence[torch.Tensor]) -> None:
        self.arena = arena
        self.layers = layers
        self._ahead: torch.Tensor | None = None
        self._cursor = 0

    def _load(self, i: int) -> torch.Tensor:
        buf = self.arena.must_lend()  # clean: returned to the caller
        buf[: self.layers[i].numel()].copy_(self.layers[i].flatten())
        return buf

    def walk(self) -> Iterator[torch.Tensor]:
        """Yields layer after layer; the buffer is valid until the next one is asked for."""
        cur = self._load(0)  # clean: near miss, finally retires the current and the look-ahead one
        nxt = None
        try:
            for i in range(len(self.layers)):
                if i + 1 < len(self.layers):
                    nxt = self._load(i + 1)  # clean: near miss, becomes current at the turn's end, or retired in finally
                yield cur[: self.layers[i].numel()]
                self.arena.retire(cur)
                cur, nxt = nxt, None
        finally:
            if cur is not None:
                self.arena.retire(cur)
            if nxt is not None:
                self.arena.retire(nxt)

    def run_until(self, stop: int) -> None:
        cur = self._load(0)  # clean: retired at the first turn
        for i in range(len(self.layers)):
            nxt = self._load(i + 1) if i + 1 < len(self.layers) else None  # leak: at the stop layer the look-ahead buffer is dropped
            self.sink(i, cur)
            self.arena.retire(cur)
            if i == stop:
                break
            cur = nxt

    def sink(self, i: int, buf: torch.Tensor) -> None:
        log.debug("layer %d norm %.3f", i, float(buf[: self.layers[i].numel()].norm()))

    def advance(self) -> torch.Tensor:
        """Hands the look-ahead buffer out and loads the next; the caller retires what it gets."""
        cur = self._ahead if self._ahead is not None else self._load(self._cursor)  # clean: returned to the caller
        self._cursor = (self._cursor + 1) % len(self.layers)
        self._ahead = self._load(self._cursor)  # clean: near miss, the one before in _ahead is what goes to the caller
        return cur

    def rewind(self) -> None:
        if self._ahead is not None:
            self.arena.retire(self._ahead)
        self._ahead = None
        self._cursor = 0


class StreamedLinear(nn.Module):
    def __init__(self, stream: LayerStream, index: int, out_f: int, in_f: int) -> None:
        super().__init__()
        self.stream = stream
        self.index = index
        self.shape = (out_f, in_f)

    def weight(self) -> torch.Tensor:
        return self.stream._load(self.index)[: self.shape[0] * self.shape[1]].view(self.shape)  # clean: a view of the buffer goes to the caller, who retires it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.weight()  # clean: near miss, retiring a view from offset zero retires its buffer
        y = x @ w.t()
        self.stream.arena.retire(w)
        return y

    def forward_cached(self, x: torch.Tensor, cache: dict[int, torch.Tensor]) -> torch.Tensor:
        if self.index in cache:
            return x @ cache[self.index].t()
        w = self.weight()  # leak: the cache gets a clone, and the buffer is not retired
        cache[self.index] = w.clone()
        return x @ w.t()

    def norm(self) -> float:
        return float(self.weight().norm())  # leak: only the number survives


class ExpertPager:
    """Keeps at most `room` experts of a MoE layer on the device."""

    def __init__(self, arena: DeviceArena, experts: Sequence[torch.Tensor], room: int) -> None:
        self.arena = arena
        self.experts = experts
        self.room = room
        self._on: dict[int, torch.Tensor] = {}
        self._hits: dict[int, int] = {}

    def page_in(self, e: int) -> torch.Tensor | None:
        if e in self._on:
            self._hits[e] += 1
            return self._on[e]
        if len(self._on) >= self.room:
            cold = min(self._on, key=lambda k: self._hits[k])
            self.arena.retire(self._on.pop(cold))
        buf = self.arena.lend_loaded(self.experts[e])  # clean: in _on, and page_in retires the coldest
        if buf is not None:
            self._on[e] = buf
            self._hits[e] = 0
        return buf

    def swap(self, gone: int, e: int) -> bool:
        if e in self._on:
            return True
        buf = self.arena.lend_loaded(self.experts[e])  # leak: returned False when the expert to go is not on the device
        if buf is None:
            return False
        if gone not in self._on:
            return False
        self.arena.retire(self._on.pop(gone))
        self._on[e] = buf
        self._hits[e] = 0
        return True

    def route(self, picks: list[int], x: torch.Tensor) -> torch.Tensor:
        acc = torch.zeros_like(x)
        for e in picks:
            temp = self.arena.lend_loaded(self.experts[e])  # leak: an expert on the device already replaces temp before its retire
            if e in self._on:
                temp = self._on[e]
            if temp is None:
                continue
            acc += x * temp[: x.numel()]
            if e not in self._on:
                self.arena.retire(temp)
        return acc / max(len(picks), 1)

    def close(self) -> None:
        while self._on:
            _, buf = self._on.popitem()
            self.arena.retire(buf)
