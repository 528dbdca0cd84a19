"""Send and receive buffers for all-to-all, cached by capacity."""
from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple, Optional

import torch


class Duplex(NamedTuple):
    send: torch.Tensor
    recv: torch.Tensor


class TokenBuffers:
    def __init__(self, hidden: int, dtype: torch.dtype, device: torch.device, max_rows: int):
        self.hidden = hidden
        self.dtype = dtype
        self.device = device
        self.max_rows = max_rows
        self.rows_out = 0
        self._by_rows: dict[int, set[torch.Tensor]] = defaultdict(set)

    def check_out(self, rows: int) -> Optional[torch.Tensor]:
        if self.rows_out + rows > self.max_rows:
            return None
        self.rows_out += rows
        shelf = self._by_rows[rows]
        if shelf:
            return shelf.pop()  # clean: returned to the caller
        return torch.empty(rows, self.hidden, dtype=self.dtype, device=self.device)

    def check_in(self, t: torch.Tensor) -> None:
        self.rows_out -= t.shape[0]
        self._by_rows[t.shape[0]].add(t)

    def duplex(self, rows: int) -> Optional[Duplex]:
        send = self.check_out(rows)  # leak: kept when there is no receive buffer
        if send is None:
            return None
        recv = self.check_out(rows)  # clean: returned to the caller in the Duplex
        if recv is None:
            return None
        return Duplex(send, recv)

    def end_duplex(self, d: Duplex) -> None:
        self.check_in(d.send)
        self.check_in(d.recv)
