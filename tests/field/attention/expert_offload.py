"""LRU of expert weights on the accelerator, the rest lives on the host."""
import collections
import logging
import typing

import torch
from torch import nn

log = logging.getLogger(__name__)


class ExpertKey(typing.NamedTuple):
    layer: int
    expert: int


class DeviceStore:
    """Fixed device storages for one expert each."""

    def __init__(self, n: int, numel: int) -> None:
        self._storages = torch.empty(n, numel)
        self._vacant: typing.List[int] = list(range(n))
        self.pinned: typing.Counter = collections.Counter()

    def allot(self) -> int:
        if not self._vacant:
            raise LookupError("device store full")
        return self._vacant.pop()

    def reclaim(self, i: int) -> None:
        self._vacant.append(i)

    def pin(self, i: int) -> torch.Tensor:
        self.pinned[i] += 1
        return self._storages[i]

    def unpin(self, i: int) -> None:
        self.pinned[i] -= 1
        if not self.pinned[i]:
            del self.pinned[i]


class ExpertCache:
    def __init__(self, store: DeviceStore, host: typing.Dict[ExpertKey, torch.Tensor]) -> None:
        self.store = store
        self.host = host
        self.where: "collections.OrderedDict[ExpertKey, int]" = collections.OrderedDict()
        self.shadow: typing.Dict[ExpertKey, int] = {}

    def _evict(self) -> bool:
        for key, i in self.where.items():
            if i not in self.store.pinned:
                del self.where[key]
                self.store.reclaim(i)
                return True
        return False

    def ensure(self, key: ExpertKey) -> typing.Optional[int]:
        if key in self.where:
            self.where.move_to_end(key)
            return self.where[key]
        while True:
            try:
                i = self.store.allot()  # clean: near miss, the handler holds nothing, a success goes into where
                break
            except LookupError:
                if not self._evict():
                    return None
        self.store._storages[i].copy_(self.host[key].flatten())
        self.where[key] = i
        return i

    def ensure_if_known(self, key: ExpertKey) -> typing.Optional[int]:
        if key in self.where:
            return self.where[key]
        i = self.store.allot()  # leak: an unknown key is swallowed with the storage allotted
        try:
            w = self.host[key]
        except KeyError:
            log.warning("no weights for %s", key)
            return None
        self.store._storages[i].copy_(w.flatten())
        self.where[key] = i
        return i

    def prefetch(self, keys: typing.Iterable[ExpertKey]) -> int:
        n = 0
        for k in keys:
            if k in self.shadow:
                continue
            try:
                i = self.store.allot()  # clean: kept in shadow, promote or drop_shadow takes it out
            except LookupError:
                break
            self.store._storages[i].copy_(self.host[k].flatten())
            self.shadow[k] = i
            n += 1
        return n

    def promote(self, key: ExpertKey) -> None:
        i = self.shadow.pop(key)
        if key in self.where:
            self.store.reclaim(i)
            return
        self.where[key] = i

    def drop_shadow(self) -> None:
        for i in self.shadow.values():
            self.store.reclaim(i)
        self.shadow = {}

    def clear(self) -> None:
        for i in self.where.values():
            self.store.reclaim(i)
        self.where.clear()
        self.drop_shadow()

    def run(self, key: ExpertKey, x: torch.Tensor) -> typing.Optional[torch.Tensor]:
        i = self.ensure(key)  # clean: the cache owns the storage
        if i is None:
            return None
        w = self.store.pin(i)  # clean: unpinned after the product
        y = x @ w.view(x.shape[-1], -1)
        self.store.unpin(i)
        return y

    def run_many(self, keys: typing.List[ExpertKey], x: torch.Tensor) -> typing.Optional[torch.Tensor]:
        acc = torch.zeros_like(x)
        pinned: typing.List[int] = []
        for k in keys:
            i = self.ensure(k)  # clean: the cache owns the storage
            if i is None:
                return None
            w = self.store.pin(i)  # leak: a later expert that cannot be loaded returns over pins already taken
            pinned.append(i)
            acc += x @ w.view(x.shape[-1], -1)
        for i in pinned:
            self.store.unpin(i)
        return acc

    def run_many_safe(self, keys: typing.List[ExpertKey], x: torch.Tensor) -> typing.Optional[torch.Tensor]:
        acc = torch.zeros_like(x)
        pinned: typing.List[int] = []
        try:
            for k in keys:
                i = self.ensure(k)  # clean: the cache owns the storage
                if i is None:
                    return None
                w = self.store.pin(i)  # clean: near miss, the finally unpins what was pinned
                pinned.append(i)
                acc += x @ w.view(x.shape[-1], -1)
            return acc
        finally:
            for i in pinned:
                self.store.unpin(i)

    def norm(self, key: ExpertKey, order: int = 2) -> float:
        i = self.ensure(key)  # clean: the cache owns the storage
        if i is None:
            return 0.0
        w = self.store.pin(i)  # leak: other orders than 2 return before unpin
        if order != 2:
            return float(w.abs().sum())
        val = float(w.norm())
        self.store.unpin(i)
        return val

    def swap_in_place(self, key: ExpertKey, new: torch.Tensor) -> bool:
        if key not in self.where:
            return False
        i = self.store.allot()  # leak: its data is copied back to the old storage, then it is neither stored nor reclaimed
        self.store._storages[i].copy_(new.flatten())
        old = self.where[key]
        self.store._storages[old].copy_(self.store._storages[i])
        return True

    def replace(self, key: ExpertKey, new: torch.Tensor) -> bool:
        if key not in self.where:
            return False
        i = self.store.allot()  # clean: near miss, it takes the table entry of the reclaimed one
        self.store._storages[i].copy_(new.flatten())
        self.where[key], old = i, self.where[key]
        self.store.reclaim(old)
        return True


class OffloadedMoE(nn.Module):
    def __init__(self, cache: ExpertCache, layer: int) -> None:
        super().__init__()
        self.cache = cache
        self.layer = layer

    def forward(self, x: torch.Tensor, experts: typing.List[int]) -> torch.Tensor:
        y = self.cache.run_many_safe([ExpertKey(self.layer, e) for e in experts], x)
        return x if y is None else x + y
