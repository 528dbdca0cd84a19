"""Per-layer quantisation with workspace leases."""
from __future__ import annotations

import typing as tp
from dataclasses import dataclass

import torch
from torch import nn

Shape = tp.Tuple[int, ...]


@dataclass(frozen=True)
class QuantConfig:
    bits: int = 8
    group: int = 32
    symmetric: bool = True
    use_pool: bool = True


class ScratchPool:
    _instance: tp.ClassVar[ScratchPool | None] = None

    def __init__(self) -> None:
        self._idle: dict[int, list[torch.Tensor]] = {}

    @classmethod
    def shared(cls) -> ScratchPool:
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def rent_scratch(self, numel: int) -> torch.Tensor:
        stack = self._idle.setdefault(numel, [])
        return stack.pop() if stack else torch.empty(numel)  # clean: goes to the caller

    def return_scratch(self, t: torch.Tensor) -> None:
        self._idle[t.numel()].append(t)


def rent(shape: Shape) -> torch.Tensor:
    numel = 1
    for s in shape:
        numel *= s
    return ScratchPool.shared().rent_scratch(numel).view(shape)  # clean: the view of it goes to the caller


def give(t: torch.Tensor) -> None:
    ScratchPool.shared().return_scratch(t.view(-1))


def quantize_tensor(w: torch.Tensor, cfg: QuantConfig) -> tuple[torch.Tensor, torch.Tensor]:
    tmp = rent(tuple(w.shape))  # clean: given after the cast
    scale = w.abs().amax(dim=-1, keepdim=True) / (2 ** (cfg.bits - 1) - 1)
    torch.div(w, scale.clamp_min(1e-8), out=tmp)
    q = tmp.round_().to(torch.int8)
    give(tmp)
    return q, scale


def quantize_groups(w: torch.Tensor, cfg: QuantConfig) -> list[torch.Tensor]:
    out = []
    for row in w.split(cfg.group, dim=-1):
        tmp = rent(tuple(row.shape))  # leak: a zero group is appended and the loop continues without give
        tmp.copy_(row)
        peak = tmp.abs().max()
        if peak == 0:
            out.append(torch.zeros_like(row, dtype=torch.int8))
            continue
        tmp.div_(peak).mul_(127)
        out.append(tmp.to(torch.int8))
        give(tmp)
    return out


def dequantize(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    out = rent(tuple(q.shape))  # clean: returned to the caller
    out.copy_(q)
    out.mul_(scale)
    return out


def roundtrip_error(w: torch.Tensor, cfg: QuantConfig) -> float:
    q, scale = quantize_tensor(w, cfg)
    deq = dequantize(q, scale)  # clean: given after the error is known
    err = float((deq - w).abs().max())
    give(deq)
    return err


def roundtrip_mse(w: torch.Tensor, cfg: QuantConfig) -> torch.Tensor:
    q, scale = quantize_tensor(w, cfg)
    return (dequantize(q, scale) - w).pow(2).mean()  # leak: the dequantised tensor is an unnamed operand


class QuantLinear(nn.Module):
    def __init__(self, lin: nn.Linear, cfg: QuantConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.q, self.scale = quantize_tensor(lin.weight.data, cfg)
        self.bias = lin.bias
        self._hot: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = dequantize(self.q, self.scale)  # clean: given after the product
        y = nn.functional.linear(x, w, self.bias)
        give(w)
        return y

    def forward_shifted(self, x: torch.Tensor, zero: float) -> torch.Tensor:
        w = dequantize(self.q, self.scale)  # leak: w = w - zero is a new tensor, the pooled one is lost
        w = w - zero
        y = x @ w.T
        give(w)
        return y

    def forward_flag(self, x: torch.Tensor) -> torch.Tensor:
        pooled = self.cfg.use_pool and not self.training
        if pooled:
            w = dequantize(self.q, self.scale)  # clean: near miss, the local flag decides on both ends
        else:
            w = self.q.float() * self.scale
        y = x @ w.T
        if pooled:
            give(w)
        return y

    def forward_mismatch(self, x: torch.Tensor) -> torch.Tensor:
        if self.cfg.use_pool:
            w = dequantize(self.q, self.scale)  # leak: the second guard is narrower, asymmetric mode keeps it
        else:
            w = self.q.float() * self.scale
        y = x @ w.T
        if self.cfg.use_pool and self.cfg.symmetric:
            give(w)
        return y

    def heat(self) -> None:
        if self._hot is None:
            self._hot = dequantize(self.q, self.scale)  # clean: cool() gives it

    def cool(self) -> None:
        hot, self._hot = self._hot, None
        if hot is not None:
            give(hot)

    def forward_hot(self, x: torch.Tensor) -> torch.Tensor:
        self.heat()
        return x @ tp.cast(torch.Tensor, self._hot).T


def calibrate(layers: tp.Iterable[QuantLinear], x: torch.Tensor) -> torch.Tensor:
    acc = rent(tuple(x.shape))  # leak: return acc / n hands out a fresh tensor and loses acc
    acc.zero_()
    n = 0
    for layer in layers:
        acc.add_(layer(x))
        n += 1
    return acc / max(n, 1)


def calibrate_max(layers: tp.Iterable[QuantLinear], x: torch.Tensor) -> float:
    acc = rent(tuple(x.shape))  # clean: near miss, given although m is what is returned
    acc.zero_()
    for layer in layers:
        torch.maximum(acc, layer(x).abs(), out=acc)
    m = acc.max().item()
    give(acc)
    return m
