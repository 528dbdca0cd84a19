from dataclasses import dataclass, field
from typing import Dict, List, Optional

import torch
import torch.distributed as dist

from zerocomm.arena import ChunkArena


@dataclass
class ShardedParam:
    name: str
    numel: int
    shard: torch.Tensor
    full: Optional[int] = None
    grads: List[int] = field(default_factory=list)


class ShardedModule:
    def __init__(self, arena: ChunkArena, params: List[ShardedParam], world: int) -> None:
        self.arena = arena
        self.params = {p.name: p for p in params}
        self.world = world
        self.prefetched: Dict[str, int] = {}

    def gather(self, name: str) -> Optional[torch.Tensor]:
        p = self.params[name]
        if p.full is None:
            if name in self.prefetched:
                p.full = self.prefetched.pop(name)
            else:
                chunk = self.arena.claim()  # clean: stored in the parameter, partition() gives it up
                if chunk is None:
                    return None
                dist.all_gather_into_tensor(self.arena.view(chunk, p.numel), p.shard)
                p.full = chunk
        return self.arena.view(p.full, p.numel)

    def partition(self, name: str) -> None:
        p = self.params[name]
        if p.full is None:
            return
        self.arena.disclaim(p.full)
        p.full = None

    def prefetch(self, names: List[str]) -> None:
        for name in names:
            if name in self.prefetched or self.params[name].full is not None:
                continue
            chunk = self.arena.claim()  # clean: gather() takes it over and cancel_prefetch() gives up the rest
            if chunk is None:
                break
            p = self.params[name]
            dist.all_gather_into_tensor(self.arena.view(chunk, p.numel), p.shard)
            self.prefetched[name] = chunk

    def cancel_prefetch(self) -> None:
        for chunk in self.prefetched.values():
            self.arena.disclaim(chunk)
        self.prefetched.clear()

    def reduce_grad(self, name: str, grad: torch.Tensor) -> bool:
        p = self.params[name]
        chunk = self.arena.claim()  # leak: a gradient that is too large is refused with the chunk in hand
        if chunk is None:
            return False
        if grad.numel() > self.arena.chunk_numel:
            return False
        v = self.arena.view(chunk, grad.numel())
        v.copy_(grad.flatten())
        dist.all_reduce(v)
        p.grads.append(chunk)
        return True

    def step(self, lr: float) -> None:
        for p in self.params.values():
            for chunk in p.grads:
                p.shard.sub_(self.arena.view(chunk, p.shard.numel()), alpha=lr)
                self.arena.disclaim(chunk)
            p.grads.clear()

    def accumulate(self, name: str, grads: List[torch.Tensor]) -> float:
        total = 0.0
        acc = self.arena.claim()  # clean: near miss, every claim of the loop goes back and so does acc
        if acc is None:
            return total
        v = self.arena.view(acc, self.params[name].numel).zero_()
        for g in grads:
            tmp = self.arena.claim()  # clean: given up within the round
            if tmp is None:
                break
            w = self.arena.view(tmp, g.numel())
            w.copy_(g.flatten())
            v[: g.numel()] += w
            self.arena.disclaim(tmp)
        total = float(v.norm())
        self.arena.disclaim(acc)
        return total

    def exchange(self, name: str) -> bool:
        p = self.params[name]
        a = self.arena.claim()  # leak: when the arena has no second chunk False is returned with the first
        b = self.arena.claim()  # clean: near miss, the refused case is the one where b is None
        if a is None or b is None:
            return False
        va, vb = self.arena.view(a, p.numel), self.arena.view(b, p.numel)
        va.copy_(p.shard)
        dist.all_to_all_single(vb, va)
        p.shard.copy_(vb)
        for c in (a, b):
            self.arena.disclaim(c)
        return True

    def norms(self) -> Dict[str, float]:
        out = {}
        for name, p in self.params.items():
            chunk = self.arena.claim()  # leak: parameters with a nan norm are skipped before the chunk goes back
            if chunk is None:
                break
            full = self.arena.view(chunk, p.numel)
            dist.all_gather_into_tensor(full, p.shard)
            norm = float(full.norm())
            if norm != norm:
                continue
            out[name] = norm
            self.arena.disclaim(chunk)
        return out
