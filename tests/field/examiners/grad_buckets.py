"""Flat gradient buckets for a data parallel trainer with optional offload."""
from __future__ import annotations

from typing import Dict, List, Optional

import torch


class BucketStore:
    """Flat buffers of one size; `loaned` counts what is out."""

    def __init__(self, numel: int, count: int):
        self.numel = numel
        self.loaned = 0
        self._shelf: List[torch.Tensor] = [torch.zeros(numel) for _ in range(count)]

    def loan(self) -> Optional[torch.Tensor]:
        if not self._shelf:
            return None
        flat = self._shelf.pop()  # clean: handed to the caller
        self.loaned += 1
        return flat

    def repay(self, flat: torch.Tensor) -> None:
        self.loaned -= 1
        self._shelf.append(flat)

    def scrub(self) -> int:
        """Zero all idle buffers."""
        done: List[torch.Tensor] = []
        while self._shelf:
            flat = self._shelf.pop()  # clean: near miss, collected in done, which becomes the shelf again
            flat.zero_()
            done.append(flat)
        self._shelf = done
        return len(done)


class GradReducer:
    """One bucket per step when bucketing is on."""

    def __init__(self, store: BucketStore, bucketed: bool, keep_last: bool = False):
        self.store = store
        self.bucketed = bucketed
        self.keep_last = keep_last
        self.bucket: Optional[torch.Tensor] = None
        self.scratch: Optional[torch.Tensor] = None

    def begin(self) -> bool:
        """Every begin is followed by one end."""
        if self.bucketed:
            self.bucket = self.store.loan()  # clean: near miss, end repays under the same unchanging flag
            return self.bucket is not None
        return True

    def end(self) -> None:
        if self.bucketed and self.bucket is not None:
            self.store.repay(self.bucket)
            self.bucket = None

    def begin_scratch(self) -> bool:
        """Every begin_scratch is followed by one end_scratch."""
        if self.bucketed:
            self.scratch = self.store.loan()  # leak: with keep_last set end_scratch forgets the buffer without repaying it
        return self.scratch is not None

    def end_scratch(self) -> None:
        if self.bucketed and not self.keep_last and self.scratch is not None:
            self.store.repay(self.scratch)
        self.scratch = None

    def norm(self, grads: List[torch.Tensor]) -> float:
        use_flat = sum(g.numel() for g in grads) <= self.store.numel
        flat = self.store.loan() if use_flat else None  # clean: near miss, repaid whenever it is not None
        total = 0.0
        pos = 0
        for g in grads:
            if flat is not None:
                flat[pos : pos + g.numel()].copy_(g.reshape(-1))
            else:
                total += float(g.norm()) ** 2
            pos += g.numel()
        if flat is not None:
            total = float(flat[:pos].norm()) ** 2
            self.store.repay(flat)
        return total**0.5

    def absmax(self, grads: List[torch.Tensor]) -> float:
        flat = self.store.loan()  # leak: repaid only if something was copied, not for an empty list
        pos = 0
        best = 0.0
        for g in grads:
            if flat is not None:
                flat[pos : pos + g.numel()].copy_(g.reshape(-1))
                pos += g.numel()
            else:
                best = max(best, float(g.abs().max()))
        if flat is not None and pos > 0:
            best = float(flat[:pos].abs().max())
            self.store.repay(flat)
        return best


class OffloadedState:
    """Optimizer state by parameter name, borrowed from the store or brought along."""

    def __init__(self, store: BucketStore):
        self.store = store
        self.state: Dict[str, torch.Tensor] = {}
        self.borrowed: Dict[str, bool] = {}

    def attach(self, name: str, given: Optional[torch.Tensor] = None) -> bool:
        if name in self.state:
            return False
        own = given is None
        flat = self.store.loan() if own else given  # clean: near miss, the flag is stored with it and detach obeys it
        if flat is None:
            return False
        self.state[name] = flat
        self.borrowed[name] = own
        return True

    def attach_second(self, name: str, given: Optional[torch.Tensor] = None) -> bool:
        key = name + ".second"
        if key in self.state:
            return False
        flat = given
        if flat is None:
            flat = self.store.loan()  # leak: the flag says borrowed only for a given tensor, detach does not repay
            if flat is None:
                return False
        self.state[key] = flat
        self.borrowed[key] = given is not None
        return True

    def detach(self, name: str) -> Optional[torch.Tensor]:
        """A tensor that was brought along goes back to its owner."""
        flat = self.state.pop(name, None)
        borrowed = self.borrowed.pop(name, False)
        if flat is not None and borrowed:
            self.store.repay(flat)
            return None
        return flat if not name.endswith(".second") else None

    def with_scratch(self, name: str, scratch: Optional[torch.Tensor] = None) -> float:
        mine = False
        if scratch is None:
            scratch = self.store.loan()  # clean: near miss, mine records the loan and governs the repayment
            if scratch is None:
                return 0.0
            mine = True
        scratch.copy_(self.state[name])
        out = float(scratch.sum())
        if mine:
            self.store.repay(scratch)
        return out

    def with_temp(self, name: str, temp: Optional[torch.Tensor] = None) -> float:
        if temp is None:
            temp = self.store.loan()  # leak: temp is never None at the last test, which cannot tell whose it is
        mine = temp is None
        out = 0.0
        if temp is not None:
            temp.copy_(self.state[name])
            out = float(temp.sum())
            if mine:
                self.store.repay(temp)
        return out
