import math
from typing import Dict, List, Optional, Tuple

import torch
import torch.nn as nn


class WorkspacePool:
    """Keeps flat fp32 workspaces per shape so that decode steps do not hit the caching allocator."""

    def __init__(self, device: str = "cpu", limit: int = 32):
        self.device = device
        self.limit = limit
        self._free: Dict[Tuple[int, ...], List[torch.Tensor]] = {}
        self._live = 0

    def borrow(self, *shape: int) -> torch.Tensor:
        stack = self._free.get(shape)
        if self._live >= self.limit:
            raise RuntimeError(f"workspace limit {self.limit} reached")
        self._live += 1
        if stack:
            return stack.pop()
        return torch.empty(shape, device=self.device)

    def give_back(self, t: torch.Tensor) -> None:
        self._live -= 1
        self._free.setdefault(tuple(t.shape), []).append(t)


class PagedAttention(nn.Module):
    def __init__(self, heads: int, dim: int, pool: WorkspacePool):
        super().__init__()
        self.heads = heads
        self.dim = dim
        self.scale = 1.0 / math.sqrt(dim)
        self.pool = pool

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = self.pool.borrow(self.heads, q.shape[1], k.shape[1])  # clean: given back below
        torch.bmm(q, k.transpose(1, 2), out=scores)
        scores.mul_(self.scale)
        probs = torch.softmax(scores, dim=-1)
        self.pool.give_back(scores)
        return torch.bmm(probs, v)

    def forward_normed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = self.pool.borrow(self.heads, q.shape[1], k.shape[1])  # leak: rebound by the scaling, the new tensor is given back
        torch.bmm(q, k.transpose(1, 2), out=scores)
        scores = scores * self.scale
        probs = torch.softmax(scores, dim=-1)
        self.pool.give_back(scores)
        return torch.bmm(probs, v)

    def forward_masked(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = self.pool.borrow(self.heads, q.shape[1], k.shape[1])  # clean: near miss, the augmented product works in place
        torch.bmm(q, k.transpose(1, 2), out=scores)
        scores *= self.scale
        scores.masked_fill_(mask, float("-inf"))
        probs = torch.softmax(scores, dim=-1)
        self.pool.give_back(scores)
        return torch.bmm(probs, v)

    def _partial(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = self.pool.borrow(self.heads, q.shape[1], self.dim)  # clean: handed to the caller
        weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)) * self.scale, dim=-1)
        torch.bmm(weights, v, out=out)
        return out

    def chunked(self, q: torch.Tensor, ks: List[torch.Tensor], vs: List[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(self.heads, q.shape[1], self.dim)
        for k, v in zip(ks, vs):
            part = self._partial(q, k, v)  # clean: each part is given back in its turn
            total += part
            self.pool.give_back(part)
        return total / len(ks)

    def single(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._partial(q, k, v).clone()  # leak: the caller gets a copy and the workspace is lost

    def averaged(self, q: torch.Tensor, ks: List[torch.Tensor], vs: List[torch.Tensor]) -> Optional[torch.Tensor]:
        if not ks:
            return None
        acc = self._partial(q, ks[0], vs[0])  # leak: the division makes a new tensor, acc is never given back
        for k, v in zip(ks[1:], vs[1:]):
            part = self._partial(q, k, v)  # clean: given back in the loop
            acc.add_(part)
            self.pool.give_back(part)
        acc = acc / len(ks)
        return acc

    def averaged_into(self, q: torch.Tensor, ks: List[torch.Tensor], vs: List[torch.Tensor], dst: torch.Tensor) -> None:
        acc = self._partial(q, ks[0], vs[0])  # clean: near miss, only changed in place before it is given back
        for k, v in zip(ks[1:], vs[1:]):
            part = self._partial(q, k, v)  # clean: given back in the loop
            acc.add_(part)
            self.pool.give_back(part)
        acc.div_(len(ks))
        dst.copy_(acc)
        self.pool.give_back(acc)

    def sinks(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, n_sink: int) -> torch.Tensor:
        head = self._partial(q, k[:, :n_sink], v[:, :n_sink])  # clean: given back on both paths
        if n_sink >= k.shape[1]:
            res = head.clone()
            self.pool.give_back(head)
            return res
        tail = self._partial(q, k[:, n_sink:], v[:, n_sink:])  # clean: given back after the sum
        res = head + tail
        self.pool.give_back(head)
        self.pool.give_back(tail)
        return res

    def windowed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
        near = self._partial(q, k[:, -window:], v[:, -window:])  # leak: the exit for far-less contexts keeps it
        if window >= k.shape[1]:
            return near.mean(dim=0, keepdim=True).expand_as(near).contiguous()
        far = self._partial(q, k[:, :-window], v[:, :-window])  # clean: given back after the sum
        res = torch.lerp(far, near, 0.5)
        self.pool.give_back(far)
        self.pool.give_back(near)
        return res
