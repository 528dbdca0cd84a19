"""The optimizer step over offloaded shards."""
from __future__ import annotations

import logging
from typing import Dict, List, Optional

import torch

from .pool import BlockArena, regain_all
from .swapper import ParamSwapper

log = logging.getLogger(__name__)


class OffloadEngine:
    def __init__(self, swapper: ParamSwapper, arena: BlockArena, lr: float, clip: Optional[float] = None):
        self.swapper = swapper
        self.arena = arena
        self.lr = lr
        self.clip = clip
        self.moments: Dict[int, tuple] = {}
        self.overflows = 0

    def register(self, pid: int, numel: int) -> bool:
        if pid in self.moments:
            return True
        m = self.arena.allot(numel)  # clean: near miss, regain_all() skips None, else both wait in moments
        v = self.arena.allot(numel)  # clean: regain_all() or moments
        if m is None or v is None:
            regain_all(self.arena, [m, v])
            return False
        m.data.zero_()
        v.data.zero_()
        self.moments[pid] = (m, v)
        return True

    def unregister(self, pid: int) -> None:
        pair = self.moments.pop(pid, None)
        if pair is not None:
            regain_all(self.arena, list(pair))

    def step(self, grads: Dict[int, torch.Tensor]) -> int:
        done = 0
        for pid, grad in grads.items():
            work = self.arena.allot(grad.numel())  # leak: continue on an overflow skips regain()
            if work is None:
                break
            g = work.data[: grad.numel()]
            g.copy_(grad.flatten())
            if not torch.isfinite(g).all():
                self.overflows += 1
                continue
            self._update(pid, g)
            self.arena.regain(work)
            done += 1
        return done

    def _update(self, pid: int, g: torch.Tensor) -> None:
        m, v = self.moments[pid]
        mom, var = m.data[: g.numel()], v.data[: g.numel()]
        mom.mul_(0.9).add_(g, alpha=0.1)
        var.mul_(0.999).addcmul_(g, g, value=0.001)

    def shard_norm(self, pid: int) -> float:
        block = self.swapper.detached_copy(pid)  # leak: the copy is reduced to a number and dropped
        if block is None:
            return 0.0
        return float(block.data.norm())

    def export(self, pids: List[int]) -> Dict[int, torch.Tensor]:
        out: Dict[int, torch.Tensor] = {}
        for pid in pids:
            block = self.swapper.detached_copy(pid)  # clean: regained after the clone
            if block is None:
                continue
            out[pid] = block.data.clone()
            self.arena.regain(block)
        return out

    def resize_moments(self, pid: int, numel: int) -> bool:
        m, v = self.moments[pid]
        wide = self.arena.allot(2 * numel)  # leak: kept when the new first moment cannot be allotted
        if wide is None:
            return False
        old = m.data.numel()
        wide.data[:old].copy_(m.data)
        wide.data[old : 2 * old].copy_(v.data)
        self.unregister(pid)
        if not self.register(pid, numel):
            return False
        m, v = self.moments[pid]
        m.data[:old].copy_(wide.data[:old])
        v.data[:old].copy_(wide.data[old : 2 * old])
        self.arena.regain(wide)
        return True

    def close(self) -> None:
        for pid in list(self.moments):
            self.unregister(pid)
        self.swapper.evict_all()
