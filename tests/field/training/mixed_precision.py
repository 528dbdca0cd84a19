"""Loss scaling and master-gradient buffers for fp16 training."""
import logging
from typing import Dict, List, Optional, Tuple

import torch

LOGGER = logging.getLogger(__name__)


class MasterGradPool:
    """fp32 buffers, handed out by size class (powers of two)."""

    def __init__(self) -> None:
        self._classes: Dict[int, List[torch.Tensor]] = {}
        self._owner: Dict[int, str] = {}

    @staticmethod
    def _size_class(n: int) -> int:
        return 1 << (n - 1).bit_length()

    def obtain(self, n: int, who: str) -> torch.Tensor:
        c = self._size_class(n)
        shelf = self._classes.setdefault(c, [])
        t = shelf.pop() if shelf else torch.empty(c)
        self._owner[id(t)] = who
        return t

    def recycle(self, t: torch.Tensor) -> None:
        self._owner.pop(id(t), None)
        self._classes[t.numel()].append(t)

    def trim(self, limit: int) -> int:
        """Move everything above the size limit out of the shelves, keep the rest."""
        removed = 0
        for c, shelf in self._classes.items():
            if c > limit:
                removed += len(shelf)
                shelf.clear()
        return removed


class ScaledTrainer:
    def __init__(self, params: List[torch.nn.Parameter], pool: MasterGradPool, init_scale: float = 2.0**16) -> None:
        self.params = params
        self.pool = pool
        self.scale = init_scale
        self.good_steps = 0
        self.accum: Optional[torch.Tensor] = None

    def _master(self, p: torch.nn.Parameter) -> torch.Tensor:
        m = self.pool.obtain(p.numel(), "master")  # clean: the caller recycles it
        m[: p.numel()].copy_(p.grad.reshape(-1))
        return m

    def unscale_and_step(self, lr: float) -> bool:
        masters: List[torch.Tensor] = []
        overflow = False
        for p in self.params:
            m = self._master(p)  # clean: near miss, the overflow return comes after all masters were recycled
            masters.append(m)
            if not torch.isfinite(m[: p.numel()]).all():
                overflow = True
                break
            m[: p.numel()].div_(self.scale)
        if not overflow:
            for p, m in zip(self.params, masters):
                p.data.sub_(m[: p.numel()].view_as(p), alpha=lr)
        for m in masters:
            self.pool.recycle(m)
        if overflow:
            self.scale /= 2.0
            return False
        self.good_steps += 1
        return True

    def unscale_and_step_eager(self, lr: float) -> bool:
        for p in self.params:
            m = self._master(p)  # leak: the overflow return keeps this parameter's master
            if not torch.isfinite(m[: p.numel()]).all():
                self.scale /= 2.0
                return False
            m[: p.numel()].div_(self.scale)
            p.data.sub_(m[: p.numel()].view_as(p), alpha=lr)
            self.pool.recycle(m)
        self.good_steps += 1
        return True

    def unscale_copy(self, p: torch.nn.Parameter) -> torch.Tensor:
        m = self._master(p)  # leak: rebound by the division, the result is a new tensor
        m = m / self.scale
        return m[: p.numel()].view_as(p)

    def unscale_clone(self, p: torch.nn.Parameter) -> torch.Tensor:
        m = self._master(p)  # clean: near miss, the divided tensor has a name of its own and m is recycled
        g = m[: p.numel()] / self.scale
        self.pool.recycle(m)
        return g.view_as(p)

    def inf_count(self) -> int:
        n = 0
        for p in self.params:
            if p.grad is None:
                continue
            n += int(torch.isinf(self._master(p)[: p.numel()]).sum())  # leak: used as a temporary, no name to recycle
        return n

    def start_accum(self, numel: int) -> None:
        if self.accum is not None and self.accum.numel() >= numel:
            self.accum.zero_()
            return
        self.accum = self.pool.obtain(numel, "accum")  # leak: a smaller accumulator is overwritten when a larger one is needed
        self.accum.zero_()

    def add_accum(self, p: torch.nn.Parameter) -> None:
        self.start_accum(p.numel())
        self.accum[: p.numel()].add_(p.grad.reshape(-1).float())

    def stop_accum(self) -> None:
        if self.accum is not None:
            self.pool.recycle(self.accum)
        self.accum = None


def bucket_by_norm(pool: MasterGradPool, grads: List[torch.Tensor], edges: Tuple[float, ...]) -> List[int]:
    counts = [0] * (len(edges) + 1)
    work = pool.obtain(max(g.numel() for g in grads), "norm")  # clean: one buffer for all, recycled after the loop
    for g in grads:
        view = work[: g.numel()]
        view.copy_(g.reshape(-1))
        n = float(view.norm())
        for i, e in enumerate(edges):
            if n < e:
                counts[i] += 1
                break
        else:
            counts[-1] += 1
    pool.recycle(work)
    return counts


def largest(pool: MasterGradPool, grads: List[torch.Tensor]) -> Optional[torch.Tensor]:
    best = None
    best_norm = -1.0
    for g in grads:
        cand = pool.obtain(g.numel(), "cand")  # clean: near miss, the beaten one is recycled, the best goes to the caller
        cand[: g.numel()].copy_(g.reshape(-1))
        n = float(cand[: g.numel()].norm())
        if n > best_norm:
            if best is not None:
                pool.recycle(best)
            best, best_norm = cand, n
        else:
            pool.recycle(cand)
    return best


def report_largest(pool: MasterGradPool, grads: List[torch.Tensor]) -> float:
    t = largest(pool, grads)  # clean: recycled unless there was none
    if t is None:
        return 0.0
    v = float(t.max())
    pool.recycle(t)
    return v


def has_large(pool: MasterGradPool, grads: List[torch.Tensor], limit: float) -> bool:
    t = largest(pool, grads)  # leak: the tensor is tested and dropped
    return t is not None and float(t.max()) > limit
