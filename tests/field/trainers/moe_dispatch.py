"""Top-k MoE layer with recycled dispatch buffers.

`DispatchArena` owns a handful of (capacity, hidden) slabs per expert-parallel rank.
Slabs are lent by handle; `slab(handle)` gives the tensor.
"""
from typing import Dict, List, NamedTuple, Optional, Set, Tuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class ArenaFull(RuntimeError):
    pass


class DispatchArena:
    def __init__(self, slabs: int, capacity: int, hidden: int, device, dtype=torch.bfloat16):
        self._mem = torch.empty(slabs, capacity, hidden, device=device, dtype=dtype)
        self._avail: Set[int] = set(range(slabs))
        self._lent: Dict[int, str] = {}
        self.capacity = capacity

    def lend(self, tag: str) -> int:
        if not self._avail:
            raise ArenaFull(f"{tag}: all {self._mem.size(0)} slabs lent: {sorted(self._lent.values())}")
        h = self._avail.pop()  # clean: recorded and returned
        self._lent[h] = tag
        return h

    def lend_pair(self, tag: str) -> Tuple[int, int]:
        a = self.lend(tag + ".send")  # clean: near miss, returned, and given back if the second one fails
        try:
            b = self.lend(tag + ".recv")  # clean: returned
        except ArenaFull:
            self.take_back(a)
            raise
        return a, b

    def take_back(self, h: int) -> None:
        del self._lent[h]
        self._avail.add(h)

    def slab(self, h: int) -> torch.Tensor:
        return self._mem[h]


class Routing(NamedTuple):
    expert: torch.Tensor  # (tokens, k)
    weight: torch.Tensor  # (tokens, k)
    kept: torch.Tensor  # (tokens, k) bool


class TopKRouter(nn.Module):
    def __init__(self, hidden: int, experts: int, k: int, capacity: int):
        super().__init__()
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.k = k
        self.capacity = capacity

    def forward(self, x: torch.Tensor) -> Routing:
        probs = F.softmax(self.gate(x).float(), dim=-1)
        weight, expert = probs.topk(self.k, dim=-1)
        onehot = F.one_hot(expert, probs.size(-1)).flatten(0, 1)
        pos = (onehot.cumsum(0) * onehot).sum(-1).view_as(expert)
        return Routing(expert, weight, pos <= self.capacity)


class ExpertParallelMoE(nn.Module):
    def __init__(self, hidden: int, ffn: int, local_experts: int, router: TopKRouter, arena: DispatchArena, group=None):
        super().__init__()
        self.router = router
        self.arena = arena
        self.group = group
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, ffn), nn.GELU(), nn.Linear(ffn, hidden)) for _ in range(local_experts)
        )
        self._cached: Optional[int] = None
        self.keep_dispatch = False

    def _fill(self, h: int, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        n = min(index.numel(), self.arena.capacity)
        dst = self.arena.slab(h)[:n]
        torch.index_select(x.to(dst.dtype), 0, index[:n], out=dst)
        return dst

    def _dispatch(self, x: torch.Tensor, index: torch.Tensor) -> Tuple[int, torch.Tensor]:
        h = self.arena.lend("dispatch")  # clean: the handle goes to the caller
        return h, self._fill(h, x, index)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        routing = self.router(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, slot = torch.where((routing.expert == e) & routing.kept)
            if rows.numel() == 0:
                continue
            h, tokens = self._dispatch(x, rows)  # clean: near miss, the continue comes before, and the loop ends with take_back
            y = expert(tokens).to(x.dtype)
            n = tokens.size(0)
            out.index_add_(0, rows[:n], y * routing.weight[rows[:n], slot[:n]].unsqueeze(-1))
            self.arena.take_back(h)
        return out

    def forward_dropless(self, x: torch.Tensor) -> torch.Tensor:
        """Experts that overflow run on the token list directly instead of a slab."""
        routing = self.router(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, slot = torch.where(routing.expert == e)
            h = self.arena.lend(f"dropless.{e}")  # leak: the overflow branch continues without taking the slab back
            if rows.numel() > self.arena.capacity:
                out.index_add_(0, rows, expert(x[rows]) * routing.weight[rows, slot].unsqueeze(-1))
                continue
            tokens = self._fill(h, x, rows)
            out.index_add_(0, rows, expert(tokens).to(x.dtype) * routing.weight[rows, slot].unsqueeze(-1))
            self.arena.take_back(h)
        return out

    def exchange(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        send, recv = self.arena.lend_pair("a2a")  # clean: both are taken back after the copy
        self._fill(send, x, index)
        dist.all_to_all_single(self.arena.slab(recv), self.arena.slab(send), group=self.group)
        got = self.arena.slab(recv).clone()
        self.arena.take_back(send)
        self.arena.take_back(recv)
        return got

    def exchange_inplace(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        send, recv = self.arena.lend_pair("a2a.inplace")  # leak: only the send slab is taken back
        self._fill(send, x, index)
        dist.all_to_all_single(self.arena.slab(recv), self.arena.slab(send), group=self.group)
        n = min(index.numel(), self.arena.capacity)
        x[index[:n]] = self.arena.slab(recv)[:n].to(x.dtype)
        self.arena.take_back(send)
        return x

    def inspect(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        h, tokens = self._dispatch(x, index)  # clean: near miss, kept in the field under the flag, else taken back
        stats = tokens.float().abs().mean(-1)
        if self.keep_dispatch:
            if self._cached is not None:
                self.arena.take_back(self._cached)
            self._cached = h
        else:
            self.arena.take_back(h)
        return stats

    def last_dispatch(self) -> Optional[torch.Tensor]:
        return None if self._cached is None else self.arena.slab(self._cached)

    def drop_cached(self) -> None:
        if self._cached is not None:
            self.arena.take_back(self._cached)
            self._cached = None

    def expert_load(self, x: torch.Tensor, e: int) -> float:
        rows, _ = torch.where(self.router(x).expert == e)
        return self._dispatch(x, rows)[1].float().norm().item()  # leak: the handle of the pair is dropped


def overlap_experts(moe: ExpertParallelMoE, chunks: List[torch.Tensor], index: List[torch.Tensor]) -> List[torch.Tensor]:
    handles: List[int] = []
    results = []
    for x, idx in zip(chunks, index):
        try:
            h, tokens = moe._dispatch(x, idx)  # clean: near miss, every handle in the list is taken back below, a failure lends none
        except ArenaFull:
            results.append(moe.experts[0](x[idx]))
            continue
        handles.append(h)
        results.append(moe.experts[0](tokens))
    for h in handles:
        moe.arena.take_back(h)
    return results


def probe_capacity(arena: DispatchArena, want: int) -> bool:
    held = []
    try:
        for i in range(want):
            held.append(arena.lend(f"probe{i}"))  # leak: on ArenaFull the handler answers False and forgets those held
    except ArenaFull:
        return False
    for h in held:
        arena.take_back(h)
    return True
