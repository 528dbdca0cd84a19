"""Quantised linear layers sharing int8 scratch through a mixin."""
from typing import List, Optional, Tuple

import torch
import torch.nn as nn

__all__ = ["ScratchPad", "Int8Linear", "Int8MLP", "FusedInt8Linear"]


class ScratchPad:
    _instance: "Optional[ScratchPad]" = None

    def __init__(self, numel: int = 1 << 20, depth: int = 4):
        self.pads: List[torch.Tensor] = [torch.empty(numel, dtype=torch.int8) for _ in range(depth)]

    @classmethod
    def shared(cls) -> "ScratchPad":
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def rent_pad(self) -> torch.Tensor:
        return self.pads.pop() if self.pads else torch.empty(1 << 20, dtype=torch.int8)  # clean: handed to the caller

    def release_pad(self, pad: torch.Tensor) -> None:
        self.pads.append(pad)


class ScratchMixin:
    pad: Optional[torch.Tensor] = None

    def hold_pad(self) -> torch.Tensor:
        if self.pad is None:
            self.pad = ScratchPad.shared().rent_pad()  # clean: near miss, only when none is held, drop_pad() releases
        return self.pad

    def drop_pad(self) -> None:
        if self.pad is not None:
            ScratchPad.shared().release_pad(self.pad)
            self.pad = None


def quantize(x: torch.Tensor, pad: torch.Tensor) -> Tuple[torch.Tensor, float]:
    scale = float(x.abs().max()) / 127 or 1.0
    q = pad[: x.numel()].view_as(x)
    q.copy_((x / scale).round())
    return q, scale


class Int8Linear(nn.Module, ScratchMixin):
    def __init__(self, inp: int, out: int):
        super().__init__()
        self.register_buffer("w", torch.zeros(out, inp, dtype=torch.int8))
        self.wscale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pad = ScratchPad.shared().rent_pad()  # clean: near miss, q is a view of it and the pad goes back
        q, s = quantize(x, pad)
        y = (q.float() @ self.w.float().t()) * (s * self.wscale)
        ScratchPad.shared().release_pad(pad)
        return y

    def forward_big(self, x: torch.Tensor) -> torch.Tensor:
        pad = ScratchPad.shared().rent_pad()  # leak: an input larger than the pad goes the float way without a release
        if x.numel() > pad.numel():
            return x @ self.w.float().t()
        q, s = quantize(x, pad)
        y = (q.float() @ self.w.float().t()) * (s * self.wscale)
        ScratchPad.shared().release_pad(pad)
        return y

    def forward_widened(self, x: torch.Tensor) -> torch.Tensor:
        pad = ScratchPad.shared().rent_pad()  # leak: the int32 copy is released in its place
        q, s = quantize(x, pad)
        pad = pad.to(torch.int32)
        y = (q.float() @ self.w.float().t()) * s
        ScratchPad.shared().release_pad(pad)
        return y

    def quantized_input(self, x: torch.Tensor) -> torch.Tensor:
        pad = ScratchPad.shared().rent_pad()  # clean: near miss, the caller gets the whole pad filled
        pad.zero_()
        quantize(x, pad)
        return pad

    def histogram(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bincount(self.quantized_input(x).int() + 128)  # leak: the pad lives only in the expression

    def saturation(self, x: torch.Tensor) -> float:
        pad = self.quantized_input(x)  # clean: released after the mean
        sat = float((pad[: x.numel()].abs() == 127).float().mean())
        ScratchPad.shared().release_pad(pad)
        return sat


class Int8MLP(nn.Module):
    def __init__(self, dim: int, hidden: int, checkpoint: bool = False):
        super().__init__()
        self.up = Int8Linear(dim, hidden)
        self.down = Int8Linear(hidden, dim)
        self.checkpoint = checkpoint
        self.kept: List[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pads = [ScratchPad.shared().rent_pad() for _ in range(2)]  # clean: near miss, kept for recompute or released
        q, s = quantize(x, pads[0])
        h = torch.relu(self.up(q.float() * s))
        q2, s2 = quantize(h, pads[1])
        y = self.down(q2.float() * s2)
        if self.checkpoint:
            self.kept.extend(pads)
        else:
            for p in pads:
                ScratchPad.shared().release_pad(p)
        return y

    def recompute_done(self) -> None:
        while self.kept:
            ScratchPad.shared().release_pad(self.kept.pop())

    def forward_eval(self, x: torch.Tensor) -> torch.Tensor:
        pads = [ScratchPad.shared().rent_pad() for _ in range(2)]  # leak: the first of the two is released, the second is not
        q, s = quantize(x, pads[0])
        h = torch.relu(self.up(q.float() * s))
        q2, s2 = quantize(h, pads[1])
        ScratchPad.shared().release_pad(pads[0])
        return self.down(q2.float() * s2)


class FusedInt8Linear(Int8Linear):
    def __init__(self, inp: int, out: int):
        super().__init__(inp, out)
        self.second = ScratchPad.shared().rent_pad()  # leak: drop_pad() is overridden and returns before it for an unused layer

    def drop_pad(self) -> None:
        if self.pad is None:
            return
        super().drop_pad()
        ScratchPad.shared().release_pad(self.second)
