"""Buffers registered with the transport. Registration is slow, so they are kept."""
from __future__ import annotations

import threading
from dataclasses import dataclass

import torch


@dataclass(eq=False)
class RegBuf:
    mem: torch.Tensor
    rkey: int
    nbytes: int

    def as_type(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        n = torch.Size(shape).numel() * dtype.itemsize
        return self.mem[:n].view(dtype).view(shape)


class Transport:
    def __init__(self) -> None:
        self._next = 1
        self.registered: dict[int, torch.Tensor] = {}

    def register(self, mem: torch.Tensor) -> int:
        key, self._next = self._next, self._next + 1
        self.registered[key] = mem
        return key

    def deregister(self, key: int) -> None:
        del self.registered[key]


class RegisteredPool:
    def __init__(self, transport: Transport, device: torch.device, budget: int) -> None:
        self.transport = transport
        self.device = device
        self.budget = budget
        self.spent = 0
        self._idle: list[RegBuf] = []
        self._mu = threading.Lock()

    def borrow(self, nbytes: int) -> RegBuf | None:
        with self._mu:
            for i, b in enumerate(self._idle):
                if b.nbytes >= nbytes:
                    return self._idle.pop(i)  # clean: handed to the caller
        return self._grow(nbytes)  # clean: handed to the caller

    def _grow(self, nbytes: int) -> RegBuf | None:
        mem = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        key = self.transport.register(mem)  # leak: not deregistered when the budget is exceeded
        if self.spent + nbytes > self.budget:
            return None
        self.spent += nbytes
        return RegBuf(mem, key, nbytes)

    def repay(self, buf: RegBuf) -> None:
        with self._mu:
            self._idle.append(buf)

    def shrink(self) -> None:
        with self._mu:
            for b in self._idle:
                self.transport.deregister(b.rkey)
                self.spent -= b.nbytes
            self._idle.clear()
