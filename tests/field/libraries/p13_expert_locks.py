"""Mixture-of-experts weight cache guarded by a table of per-expert locks."""
from __future__ import annotations

import threading
import time
from typing import Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, nn


class LockTable:
    """lock(key) blocks, try_lock(key) does not; unlock(key) wakes the waiters."""

    def __init__(self) -> None:
        self._cond = threading.Condition()
        self._held: Set[int] = set()

    def lock(self, key: int, timeout: Optional[float] = None) -> bool:
        with self._cond:
            ok = self._cond.wait_for(lambda: key not in self._held, timeout)
            if ok:
                self._held.add(key)
            return ok

    def try_lock(self, key: int) -> bool:
        with self._cond:
            if key in self._held:
                return False
            self._held.add(key)
            return True

    def unlock(self, key: int) -> None:
        with self._cond:
            self._held.discard(key)
            self._cond.notify_all()


class ExpertStore:
    def __init__(self, experts: Sequence[nn.Module], device: torch.device, resident: int) -> None:
        self.experts = list(experts)
        self.device = device
        self.resident_limit = resident
        self.resident: Dict[int, float] = {}
        self.locks = LockTable()
        self._order = threading.Lock()
        self.hits = 0
        self.evictions = 0

    def _load(self, i: int) -> nn.Module:
        if i not in self.resident:
            self.experts[i].to(self.device)
        self.resident[i] = time.monotonic()
        return self.experts[i]

    def run(self, i: int, x: Tensor) -> Tensor:
        self.locks.lock(i)  # clean: unlocked in the finally clause
        try:
            return self._load(i)(x)
        finally:
            self.locks.unlock(i)

    def run_if_resident(self, i: int, x: Tensor) -> Optional[Tensor]:
        if not self.locks.try_lock(i):  # leak: an expert that is not resident returns with its lock held
            return None
        if i not in self.resident:
            return None
        self.hits += 1
        y = self.experts[i](x)
        self.locks.unlock(i)
        return y

    def run_pair(self, i: int, j: int, x: Tensor) -> Optional[Tensor]:
        lo, hi = min(i, j), max(i, j)
        if lo == hi:
            return self.run(i, x)
        self.locks.lock(lo)  # clean: near miss, unlocked in the failure branch as well as at the end
        if not self.locks.lock(hi, timeout=1.0):  # clean: near miss, the failure branch holds only the lower lock
            self.locks.unlock(lo)
            return None
        y = self._load(i)(x) + self._load(j)(x)
        self.locks.unlock(hi)
        self.locks.unlock(lo)
        return y

    def average_into(self, src: int, dst: int, weight: float) -> bool:
        first, second = sorted((src, dst))
        self.locks.lock(first)  # leak: a timeout on the second lock returns without unlocking the first
        if first == second:
            self.locks.unlock(first)
            return False
        if not self.locks.lock(second, timeout=0.5):  # clean: unlocked at the end, and the failed branch does not hold it
            return False
        with torch.no_grad():
            for a, b in zip(self.experts[dst].parameters(), self.experts[src].parameters()):
                a.lerp_(b.to(a.device), weight)
        self.locks.unlock(second)
        self.locks.unlock(first)
        return True

    def evict(self, want: int) -> int:
        freed = 0
        for i, _ in sorted(self.resident.items(), key=lambda kv: kv[1]):
            if freed >= want:
                break
            if not self.locks.try_lock(i):  # clean: near miss, the busy branch continues without holding the lock
                continue
            self.experts[i].cpu()
            del self.resident[i]
            self.evictions += 1
            freed += 1
            self.locks.unlock(i)
        return freed

    def evict_stale(self, older_than: float) -> int:
        freed = 0
        now = time.monotonic()
        for i in list(self.resident):
            if not self.locks.try_lock(i):  # leak: recently used experts continue with their lock held
                continue
            if now - self.resident[i] < older_than:
                continue
            self.experts[i].cpu()
            del self.resident[i]
            freed += 1
            self.locks.unlock(i)
        return freed

    def pin_set(self, keys: Iterable[int]) -> List[int]:
        got: List[int] = []
        for key in sorted(set(keys)):
            self.locks.lock(key)  # clean: the keys go to the caller, who unlocks them
            got.append(key)
            self._load(key)
        return got

    def unpin_set(self, keys: Iterable[int]) -> None:
        for key in keys:
            self.locks.unlock(key)

    def reorder(self, permutation: Sequence[int]) -> bool:
        self._order.acquire()  # clean: near miss, the early return releases as well
        if len(permutation) != len(self.experts):
            self._order.release()
            return False
        self.experts = [self.experts[i] for i in permutation]
        self.resident.clear()
        self._order.release()
        return True

    def snapshot(self, reader: Callable[[nn.Module], Tensor]) -> List[Tensor]:
        self._order.acquire()  # leak: the empty store returns before the release
        if not self.experts:
            return []
        out = [reader(e).detach().cpu() for e in self.experts]
        self._order.release()
        return out


class ExpertGuard:
    """with ExpertGuard(store, keys) as modules: ..."""

    def __init__(self, store: ExpertStore, keys: Sequence[int]) -> None:
        self.store = store
        self.keys = keys
        self._pinned: List[int] = []

    def __enter__(self) -> List[nn.Module]:
        self._pinned = self.store.pin_set(self.keys)  # clean: near miss, __exit__ unlocks them whether or not there was an exception
        return [self.store.experts[i] for i in self._pinned]

    def __exit__(self, exc_type, exc, tb) -> bool:
        pinned, self._pinned = self._pinned, []
        self.store.unpin_set(pinned)
        return exc_type is TimeoutError


class MoELayer(nn.Module):
    def __init__(self, store: ExpertStore, dim: int, k: int = 2) -> None:
        super().__init__()
        self.store = store
        self.router = nn.Linear(dim, len(store.experts))
        self.k = k

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.k, dim=-1)
        wanted = chosen.unique().tolist()
        out = torch.zeros_like(x)
        with ExpertGuard(self.store, wanted) as modules:  # clean: the guard unlocks at the end of the block
            for key, module in zip(sorted(wanted), modules):
                hit = (chosen == key).nonzero(as_tuple=True)
                out.index_add_(0, hit[0], module(x[hit[0]]) * weights[hit].unsqueeze(-1))
        return out

    def preload(self, x: Tensor) -> Tuple[int, float]:
        chosen = self.router(x).argmax(-1)
        pinned = self.store.pin_set(chosen.unique().tolist())  # leak: the locks of the set are never given up
        share = len(pinned) / max(1, len(self.store.experts))
        return len(pinned), share
