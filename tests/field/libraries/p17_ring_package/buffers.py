"""Buffer bank shared by the exchange and the attention module."""
from __future__ import annotations

from collections import defaultdict
from typing import Dict, List, Optional, Tuple

import torch
from torch import Tensor


class BufferBank:
    def __init__(self, device: torch.device, ceiling: int = 1 << 30) -> None:
        self.device = device
        self.ceiling = ceiling
        self.lent_bytes = 0
        self._vault: Dict[Tuple[int, torch.dtype], List[Tensor]] = defaultdict(list)

    def lend(self, numel: int, dtype: torch.dtype) -> Optional[Tensor]:
        nbytes = numel * dtype.itemsize
        if self.lent_bytes + nbytes > self.ceiling:
            return None
        self.lent_bytes += nbytes
        shelf = self._vault[(numel, dtype)]
        if shelf:
            return shelf.pop()  # clean: handed to the caller
        return torch.empty(numel, dtype=dtype, device=self.device)

    def reclaim(self, buf: Tensor) -> None:
        flat = buf.view(-1)
        self.lent_bytes -= flat.numel() * flat.element_size()
        self._vault[(flat.numel(), flat.dtype)].append(flat)


class PairBuffer:
    """Two buffers of one size, used front and back in turn."""

    def __init__(self, bank: BufferBank, numel: int, dtype: torch.dtype) -> None:
        self.bank = bank
        self.numel = numel
        self.front = bank.lend(numel, dtype)  # clean: reclaimed in close
        self.back = bank.lend(numel, dtype)  # clean: near miss, flip exchanges it with front and close reclaims both

    @property
    def complete(self) -> bool:
        return self.front is not None and self.back is not None

    def flip(self) -> None:
        self.front, self.back = self.back, self.front

    def close(self) -> None:
        for name in ("front", "back"):
            buf = getattr(self, name)
            if buf is not None:
                self.bank.reclaim(buf)
                setattr(self, name, None)


class GrowingBuffer:
    """One buffer that is replaced by a larger one on demand."""

    def __init__(self, bank: BufferBank) -> None:
        self.bank = bank
        self.buf: Optional[Tensor] = None

    def at_least(self, numel: int, dtype: torch.dtype) -> Optional[Tensor]:
        if self.buf is None or self.buf.numel() < numel:
            self.buf = self.bank.lend(numel, dtype)  # leak: the smaller buffer it replaces is not reclaimed
        return self.buf

    def close(self) -> None:
        if self.buf is not None:
            self.bank.reclaim(self.buf)
            self.buf = None
