"""Quantisation workspaces: scale slots in a bitmap, code buffers in size buckets."""
from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Tuple

import torch


class ScaleTable:
    """A table of per-group scales; rows are handed out by index."""

    def __init__(self, rows: int, groups: int, device) -> None:
        self.values = torch.ones(rows, groups, device=device)
        self._mask = (1 << rows) - 1

    def claim_row(self) -> int:
        if self._mask == 0:
            return -1
        row = (self._mask & -self._mask).bit_length() - 1
        self._mask &= ~(1 << row)
        return row

    def unclaim_row(self, row: int) -> None:
        self._mask |= 1 << row

    def rows_left(self) -> int:
        return bin(self._mask).count("1")


class CodeBuffers:
    """int8 buffers sorted by size, smallest fitting one first."""

    def __init__(self, device) -> None:
        self.device = device
        self._sizes: List[int] = []
        self._by_size: Dict[int, List[torch.Tensor]] = {}

    def lease(self, numel: int) -> torch.Tensor:
        at = bisect_left(self._sizes, numel)
        if at == len(self._sizes):
            return torch.empty(numel, dtype=torch.int8, device=self.device)
        size = self._sizes.pop(at)
        return self._by_size[size].pop()  # clean: returned to the leaseholder

    def unlease(self, buf: torch.Tensor) -> None:
        insort(self._sizes, buf.numel())
        self._by_size.setdefault(buf.numel(), []).append(buf)


@dataclass
class QuantizedTensor:
    codes: torch.Tensor
    row: int
    shape: Tuple[int, ...]
    meta: dict = field(default_factory=dict)


class Quantizer:
    def __init__(self, table: ScaleTable, buffers: CodeBuffers, group: int = 128) -> None:
        self.table = table
        self.buffers = buffers
        self.group = group
        self.live: Dict[str, QuantizedTensor] = {}

    def quantize(self, x: torch.Tensor) -> Optional[QuantizedTensor]:
        row = self.table.claim_row()  # leak: an empty tensor returns None after the row was claimed
        if row < 0:
            return None
        if x.numel() == 0:
            return None
        codes = self.buffers.lease(x.numel())  # clean: goes out in the QuantizedTensor
        groups = x.reshape(-1, self.group)
        scale = groups.abs().amax(dim=1).div_(127)
        self.table.values[row, : scale.numel()] = scale
        codes[: x.numel()] = (groups / scale[:, None]).round().reshape(-1).to(torch.int8)
        return QuantizedTensor(codes, row, tuple(x.shape))

    def dispose(self, q: QuantizedTensor) -> None:
        self.table.unclaim_row(q.row)
        self.buffers.unlease(q.codes)

    def dequantize(self, q: QuantizedTensor) -> torch.Tensor:
        numel = torch.Size(q.shape).numel()
        scale = self.table.values[q.row, : numel // self.group]
        return (q.codes[:numel].view(-1, self.group).float() * scale[:, None]).view(q.shape)

    def register(self, name: str, x: torch.Tensor) -> bool:
        q = self.quantize(x)  # clean: near miss, the previous entry is disposed before being replaced
        if q is None:
            return False
        previous = self.live.get(name)
        if previous is not None:
            self.dispose(previous)
        self.live[name] = q
        return True

    def register_alias(self, name: str, x: torch.Tensor, note: str) -> None:
        q = self.quantize(x)  # leak: overwrites the entry live holds under the same name
        if q is None:
            return
        q.meta["note"] = note
        self.live[name] = q

    def unregister(self, name: str) -> None:
        q = self.live.pop(name, None)  # clean: disposed when present
        if q is not None:
            self.dispose(q)

    def close(self) -> None:
        for name in list(self.live):
            self.unregister(name)

    def error(self, x: torch.Tensor) -> float:
        q = self.quantize(x)  # leak: the round trip is measured and q is left behind
        if q is None:
            return 0.0
        return (self.dequantize(q) - x).abs().max().item()

    def roundtrip(self, x: torch.Tensor, hook: Optional[Callable[[torch.Tensor], None]] = None) -> torch.Tensor:
        q = self.quantize(x)  # clean: near miss, disposed after the optional hook on both branches
        if q is None:
            return x
        y = self.dequantize(q)
        if hook is None:
            self.dispose(q)
            return y
        hook(y)
        self.dispose(q)
        return y


def search_clip(qz: Quantizer, w: torch.Tensor, ratios: List[float]) -> Tuple[float, Optional[QuantizedTensor]]:
    best_err, best_ratio, best_q = float("inf"), 1.0, None
    for r in ratios:
        limit = w.abs().max() * r
        q = qz.quantize(w.clamp(-limit, limit))  # clean: near miss, loser is disposed, winner is returned
        if q is None:
            break
        err = (qz.dequantize(q) - w).pow(2).mean().item()
        if err < best_err:
            if best_q is not None:
                qz.dispose(best_q)
            best_err, best_ratio, best_q = err, r, q
        else:
            qz.dispose(q)
    return best_ratio, best_q


def apply_clip(qz: Quantizer, w: torch.Tensor, ratios: List[float], threshold: float) -> torch.Tensor:
    ratio, q = search_clip(qz, w, ratios)  # leak: a ratio under the threshold returns w without disposing q
    if ratio < threshold or q is None:
        return w
    out = qz.dequantize(q)
    qz.dispose(q)
    return out


def pack_int4(buffers: CodeBuffers, codes: torch.Tensor) -> torch.Tensor:
    half = buffers.lease((codes.numel() + 1) // 2)  # clean: the leased buffer itself is returned
    lo, hi = codes[0::2], codes[1::2]
    half[: hi.numel()] = (lo[: hi.numel()] & 0xF) | (hi << 4)
    return half


def packed_size(buffers: CodeBuffers, layers: List[torch.Tensor]) -> int:
    total = 0
    for codes in layers:
        packed = pack_int4(buffers, codes)  # clean: unleased each round
        total += packed.numel()
        buffers.unlease(packed)
    return total
