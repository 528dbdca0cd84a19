"""Top-k and low-rank gradient compression hooks."""
from __future__ import annotations

import logging
from typing import Any, Dict, List, NamedTuple, Optional

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


class CommHandle(NamedTuple):
    values: torch.Tensor
    indices: torch.Tensor


class CompressionBuffers:
    def __init__(self, k: int, n: int, rank: int = 4) -> None:
        self.k = k
        self._pairs: List[CommHandle] = [
            CommHandle(torch.empty(k), torch.empty(k, dtype=torch.long)) for _ in range(n)
        ]
        self._mats: List[torch.Tensor] = [torch.empty(1 << 14, rank) for _ in range(n)]

    def take_pair(self) -> CommHandle:
        return self._pairs.pop()

    def return_pair(self, h: CommHandle) -> None:
        self._pairs.append(h)

    def take_mat(self) -> torch.Tensor:
        return self._mats.pop()

    def return_mat(self, m: torch.Tensor) -> None:
        self._mats.append(m)


class TopKState:
    def __init__(self, bufs: CompressionBuffers, warmup: int = 100, momentum: Optional[float] = None) -> None:
        self.bufs = bufs
        self.warmup = warmup
        self.momentum = momentum
        self.iteration = 0
        self.residual: Dict[int, torch.Tensor] = {}

    def compress(self, grad: torch.Tensor) -> CommHandle:
        h = self.bufs.take_pair()  # clean: the caller returns the pair
        flat = grad.reshape(-1)
        torch.topk(flat.abs(), self.bufs.k, out=(h.values, h.indices))
        h.values.copy_(flat[h.indices])
        return h

    def hook(self, grad: torch.Tensor) -> torch.Tensor:
        self.iteration += 1
        if self.iteration < self.warmup:
            dist.all_reduce(grad)
            return grad
        h = self.compress(grad)  # clean: near miss, the warm-up return lies before it
        out = torch.zeros_like(grad).view(-1)
        out.index_add_(0, h.indices, h.values)
        self.bufs.return_pair(h)
        dist.all_reduce(out)
        return out.view_as(grad)

    def hook_sparse(self, grad: torch.Tensor) -> Optional[torch.Tensor]:
        h = self.compress(grad)  # leak: an all-zero gradient returns None with the pair taken
        if not h.values.any():
            return None
        out = torch.sparse_coo_tensor(h.indices.clone()[None], h.values.clone(), (grad.numel(),))
        self.bufs.return_pair(h)
        return out

    def error(self, grad: torch.Tensor) -> float:
        values, indices = self.compress(grad)  # leak: unpacked and never joined into a pair again
        flat = grad.reshape(-1).clone()
        flat[indices] -= values
        return float(flat.norm())

    def error_joined(self, grad: torch.Tensor) -> float:
        values, indices = self.compress(grad)  # clean: near miss, unpacked but rebuilt as the same pair for the return
        flat = grad.reshape(-1).clone()
        flat[indices] -= values
        self.bufs.return_pair(CommHandle(values, indices))
        return float(flat.norm())

    def with_momentum(self, grad: torch.Tensor) -> torch.Tensor:
        h = None
        if self.momentum is not None:
            h = self.compress(grad)  # clean: near miss, the later test on momentum matches
            h.values.mul_(self.momentum)
        out = grad.clone()
        if self.momentum is not None:
            out.view(-1)[h.indices] += h.values
            self.bufs.return_pair(h)
        return out

    def with_momentum_late(self, grad: torch.Tensor) -> torch.Tensor:
        h = self.compress(grad)  # leak: without momentum the pair is never returned
        out = grad.clone()
        if self.momentum is not None:
            out.view(-1)[h.indices] += h.values * self.momentum
            self.bufs.return_pair(h)
        return out


def power_iteration(bufs: CompressionBuffers, m: torch.Tensor, rounds: int) -> torch.Tensor:
    q = bufs.take_mat()  # leak: rebound by qr, which gives a new matrix
    q[: m.shape[1]].normal_()
    for _ in range(rounds):
        p = m @ q[: m.shape[1]]
        q = torch.linalg.qr(m.t() @ p).Q
    bufs.return_mat(q)
    return m @ q


def power_iteration_out(bufs: CompressionBuffers, m: torch.Tensor, rounds: int) -> torch.Tensor:
    q = bufs.take_mat()  # clean: near miss, written through copy_ so that q stays the pooled matrix
    view = q[: m.shape[1]]
    view.normal_()
    for _ in range(rounds):
        p = m @ view
        view.copy_(torch.linalg.qr(m.t() @ p).Q)
    out = m @ view
    bufs.return_mat(q)
    return out


def pick_mat(bufs: CompressionBuffers, prefer_fresh: bool) -> torch.Tensor:
    if prefer_fresh:
        return torch.empty(1 << 14, 4)
    return bufs.take_mat()  # clean: the caller knows by its own flag whether to return it


def low_rank(bufs: CompressionBuffers, m: torch.Tensor, fresh: bool) -> torch.Tensor:
    q = pick_mat(bufs, fresh)  # clean: near miss, returned exactly when it came from the pool
    q[: m.shape[1]].normal_()
    out = m @ q[: m.shape[1]]
    if not fresh:
        bufs.return_mat(q)
    return out


def low_rank_inverted(bufs: CompressionBuffers, m: torch.Tensor, fresh: bool) -> torch.Tensor:
    q = pick_mat(bufs, fresh)  # leak: the test is the wrong way round, pooled matrices are kept
    q[: m.shape[1]].normal_()
    out = m @ q[: m.shape[1]]
    if fresh:
        bufs.return_mat(q)
    return out
