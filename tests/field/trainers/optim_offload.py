"""Optimizer state on the host, streamed through device tiles during step().

Tiles are lent out by a best-fit allocator over extents of one device buffer.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

import torch
from torch.nn import Parameter

Extent = Tuple[int, int]  # offset, length


class TileAllocator:
    def __init__(self, numel: int, device):
        self.base = torch.empty(numel, device=device)
        self._holes: List[Extent] = [(0, numel)]

    def carve(self, n: int) -> Optional[Extent]:
        fit = [h for h in self._holes if h[1] >= n]
        if not fit:
            return None
        hole = min(fit, key=lambda h: h[1])
        self._holes.remove(hole)  # clean: the front goes to the caller, the remainder is put back as a hole
        off, length = hole
        if length > n:
            self._holes.append((off + n, length - n))
        return off, n

    def fill(self, ext: Extent) -> None:
        self._holes.append(ext)
        self._holes.sort()
        merged: List[Extent] = []
        for off, n in self._holes:
            if merged and merged[-1][0] + merged[-1][1] == off:
                merged[-1] = (merged[-1][0], merged[-1][1] + n)
            else:
                merged.append((off, n))
        self._holes = merged

    def tensor(self, ext: Extent) -> torch.Tensor:
        return self.base[ext[0] : ext[0] + ext[1]]


@dataclass
class HostState:
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: int = 0


class StreamedAdamW:
    def __init__(self, params: List[Parameter], tiles: TileAllocator, lr: float = 1e-4, betas=(0.9, 0.95), eps: float = 1e-8):
        self.params = params
        self.tiles = tiles
        self.lr, self.betas, self.eps = lr, betas, eps
        self.state: Dict[int, HostState] = {
            i: HostState(torch.zeros(p.numel()).pin_memory(), torch.zeros(p.numel()).pin_memory())
            for i, p in enumerate(params)
        }
        self._hot: Dict[int, Extent] = {}

    def _load(self, src: torch.Tensor) -> Optional[Extent]:
        ext = self.tiles.carve(src.numel())  # clean: near miss, None or an extent for the caller
        if ext is not None:
            self.tiles.tensor(ext).copy_(src, non_blocking=True)
        return ext

    def _store(self, ext: Extent, dst: torch.Tensor) -> None:
        dst.copy_(self.tiles.tensor(ext))
        self.tiles.fill(ext)

    def step(self) -> None:
        for i, p in enumerate(self.params):
            if p.grad is None:
                continue
            st = self.state[i]
            m = self._load(st.exp_avg)  # clean: near miss, filled when there is no room for the second moment
            if m is None:
                self._step_on_host(p, st)
                continue
            v = self._load(st.exp_avg_sq)  # clean: stored back below or None
            if v is None:
                self.tiles.fill(m)
                self._step_on_host(p, st)
                continue
            st.step += 1
            self._apply(p, self.tiles.tensor(m), self.tiles.tensor(v), st.step)
            self._store(m, st.exp_avg)
            self._store(v, st.exp_avg_sq)

    def _apply(self, p: Parameter, m: torch.Tensor, v: torch.Tensor, step: int) -> None:
        g = p.grad.flatten().to(m.dtype)
        b1, b2 = self.betas
        m.lerp_(g, 1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        denom = (v / (1 - b2 ** step)).sqrt_().add_(self.eps)
        p.data.view(-1).addcdiv_(m.to(p.dtype), denom.to(p.dtype), value=-self.lr / (1 - b1 ** step))

    def _step_on_host(self, p: Parameter, st: HostState) -> None:
        st.step += 1
        host = Parameter(p.data.cpu())
        host.grad = p.grad.cpu()
        self._apply(host, st.exp_avg, st.exp_avg_sq, st.step)
        p.data.copy_(host.data)

    def step_lion(self, lr: float) -> int:
        """Sign update with the first moment only. Returns the number of updated tensors."""
        n = 0
        for i, p in enumerate(self.params):
            m = self._load(self.state[i].exp_avg)  # leak: parameters without a gradient continue with the tile loaded
            if m is None:
                break
            if p.grad is None:
                continue
            t = self.tiles.tensor(m)
            g = p.grad.flatten().to(t.dtype)
            p.data.view(-1).add_((t * self.betas[0] + g * (1 - self.betas[0])).sign_().to(p.dtype), alpha=-lr)
            t.lerp_(g, 1 - self.betas[1])
            self._store(m, self.state[i].exp_avg)
            n += 1
        return n

    def effective_lr(self, i: int) -> Optional[torch.Tensor]:
        st = self.state[i]
        m = self._load(st.exp_avg)  # leak: returning for a missing second tile forgets the first
        v = self._load(st.exp_avg_sq)  # leak: and the other way round when only the first is missing
        if m is None or v is None:
            return None
        ratio = self.tiles.tensor(m).abs() / (self.tiles.tensor(v).sqrt() + self.eps)
        self.tiles.fill(m)
        self.tiles.fill(v)
        return ratio.mul_(self.lr)

    # ---- hot parameters stay on the device between steps ----

    def heat(self, i: int) -> bool:
        if i in self._hot:
            return True
        ext = self._load(self.state[i].exp_avg)  # clean: near miss, kept in _hot, cool() stores it
        if ext is None:
            return False
        self._hot[i] = ext
        return True

    def reheat(self, order: List[int]) -> None:
        hot: Dict[int, Extent] = {}
        for i in order:
            ext = self._load(self.state[i].exp_avg)  # leak: the previous dict of hot extents is replaced as a whole
            if ext is None:
                break
            hot[i] = ext
        self._hot = hot

    def cool(self) -> None:
        for i, ext in self._hot.items():
            self._store(ext, self.state[i].exp_avg)
        self._hot.clear()


def grad_noise_scale(tiles: TileAllocator, grads: List[torch.Tensor]) -> float:
    acc = tiles.carve(grads[0].numel())  # clean: filled after the loop
    if acc is None:
        return float("nan")
    mean = tiles.tensor(acc).zero_()
    small = 0.0
    for g in grads:
        tmp = tiles.carve(g.numel())  # leak: not filled before the next gradient is carved
        if tmp is None:
            break
        t = tiles.tensor(tmp).copy_(g.flatten())
        small += t.pow(2).sum().item()
        mean.add_(t, alpha=1.0 / len(grads))
    big = mean.pow(2).sum().item()
    tiles.fill(acc)
    return (small / len(grads) - big) / max(big, 1e-12)
