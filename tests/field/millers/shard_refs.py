"""Reference-counted weight shards for hot-swapping models between evaluation and training ranks."""
from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Sequence


@dataclass
class Shard:
    name: str
    version: int
    payload: bytes
    count: int = 0
    dirty: bool = False


@dataclass
class SwapRequest:
    name: str
    shards: List[Shard] = field(default_factory=list)
    target: Optional[Shard] = None
    cancelled: bool = False


class ShardRegistry:
    """``incref`` keeps a shard resident; at zero it goes to the eviction order."""

    def __init__(self, load: Callable[[str], bytes], capacity: int) -> None:
        self._load = load
        self._capacity = capacity
        self._resident: Dict[str, Shard] = {}
        self._evictable: "OrderedDict[str, Shard]" = OrderedDict()
        self._lock = threading.RLock()

    def incref(self, name: str) -> Shard:
        with self._lock:
            shard = self._resident.get(name)
            if shard is None:
                if len(self._resident) >= self._capacity:
                    self._evict_one()
                shard = self._resident[name] = Shard(name, 1, self._load(name))
            self._evictable.pop(name, None)
            shard.count += 1
            return shard

    def incref_if_resident(self, name: str) -> Optional[Shard]:
        with self._lock:
            if name not in self._resident:
                return None
            return self.incref(name)  # clean: handed on to the caller

    def decref(self, shard: Shard) -> None:
        with self._lock:
            shard.count -= 1
            if shard.count == 0:
                self._evictable[shard.name] = shard

    def _evict_one(self) -> None:
        if not self._evictable:
            raise MemoryError("all shards are referenced")
        name, _ = self._evictable.popitem(last=False)
        del self._resident[name]

    def referenced(self) -> int:
        with self._lock:
            return sum(s.count for s in self._resident.values())

    def incref_all(self, names: Sequence[str]) -> Optional[List[Shard]]:
        """All or nothing."""
        held: List[Shard] = []
        for name in names:
            try:
                held.append(self.incref(name))  # clean: near miss, held is rolled back when a load fails
            except OSError:
                for shard in reversed(held):
                    self.decref(shard)
                return None
        return held

    def replace(self, old: Shard, name: str) -> Shard:
        """Exchange a reference for one to another shard."""
        new = self.incref(name)  # clean: returned in place of old
        self.decref(old)
        return new


class Router:
    """Requests wait with the shards they need; ``finish`` drops the references."""

    def __init__(self, registry: ShardRegistry) -> None:
        self.registry = registry
        self.waiting: List[SwapRequest] = []
        self.active: Dict[str, SwapRequest] = {}
        self._default: Optional[Shard] = None

    def submit(self, req: SwapRequest, names: Sequence[str]) -> bool:
        shards = self.registry.incref_all(names)  # clean: moved into the request, dropped by finish
        if shards is None:
            return False
        req.shards.extend(shards)
        self.waiting.append(req)
        return True

    def submit_fast(self, req: SwapRequest, name: str) -> bool:
        shard = self.registry.incref_if_resident(name)  # leak: a cancelled request returns before the shard is moved in
        if shard is None:
            return False
        if req.cancelled:
            return False
        req.shards.append(shard)
        self.waiting.append(req)
        return True

    def retarget(self, req: SwapRequest, name: str) -> None:
        req.target = self.registry.incref(name)  # leak: a request that had a target loses the reference to the former one

    def retarget_to(self, req: SwapRequest, name: str) -> None:
        if req.target is None:
            req.target = self.registry.incref(name)  # clean: near miss, only without a former target; finish drops it
        else:
            req.target = self.registry.replace(req.target, name)  # clean: replace drops the former reference

    def start(self, n: int) -> int:
        started = 0
        while self.waiting and started < n and self.waiting[0].name not in self.active:
            req = self.waiting.pop(0)
            self.active[req.name] = req
            started += 1
        return started

    def finish(self, name: str) -> None:
        self._drop(self.active.pop(name))

    def _drop(self, req: SwapRequest) -> None:
        while req.shards:
            self.registry.decref(req.shards.pop())
        if req.target is not None:
            self.registry.decref(req.target)
            req.target = None

    def set_default(self, name: str) -> None:
        shard = self.registry.incref(name)  # clean: near miss, becomes the default; the same or the former one is dropped
        if self._default is not None:
            self.registry.decref(self._default)
        self._default = shard

    def close(self) -> None:
        while self.waiting:
            self._drop(self.waiting.pop())
        for name in list(self.active):
            self.finish(name)
        if self._default is not None:
            self.registry.decref(self._default)
            self._default = None


class ShardView:
    """A counted view; ``close`` is idempotent."""

    def __init__(self, registry: ShardRegistry, name: str) -> None:
        self._registry = registry
        self._shard: Optional[Shard] = registry.incref(name)  # clean: dropped by close

    @property
    def payload(self) -> bytes:
        assert self._shard is not None
        return self._shard.payload

    def close(self) -> None:
        shard, self._shard = self._shard, None
        if shard is not None:
            self._registry.decref(shard)

    def __enter__(self) -> "ShardView":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def checksum(registry: ShardRegistry, names: Sequence[str]) -> int:
    total = 0
    for name in names:
        with ShardView(registry, name) as view:  # clean: __exit__ closes
            if not view.payload:
                continue
            total ^= hash(view.payload)
    return total


def diff(registry: ShardRegistry, a: str, b: str) -> int:
    left = ShardView(registry, a)  # leak: equal names return without close
    if a == b:
        return 0
    right = ShardView(registry, b)  # clean: closed at the end
    n = sum(x != y for x, y in zip(left.payload, right.payload))
    right.close()
    left.close()
    return n


def biggest(registry: ShardRegistry, names: Sequence[str]) -> int:
    best: Optional[Shard] = None
    for name in names:
        shard = registry.incref(name)  # leak: a larger shard displaces best without decref of the former best
        if best is None or len(shard.payload) > len(best.payload):
            best = shard
        else:
            registry.decref(shard)
    if best is None:
        return 0
    size = len(best.payload)
    registry.decref(best)
    return size


def smallest(registry: ShardRegistry, names: Sequence[str]) -> int:
    best: Optional[Shard] = None
    for name in names:
        shard = registry.incref(name)  # clean: near miss, loser of each comparison is dropped, the winner after the loop
        if best is not None and len(shard.payload) >= len(best.payload):
            registry.decref(shard)
            continue
        if best is not None:
            registry.decref(best)
        best = shard
    size = 0
    if best is not None:
        size = len(best.payload)
        registry.decref(best)
    return size


def touch_dirty(registry: ShardRegistry, names: Sequence[str], sink: Callable[[Shard], None]) -> int:
    n = 0
    for name in names:
        shard = registry.incref_if_resident(name)  # leak: a failing sink (OSError) goes on to the next without decref
        if shard is None:
            continue
        try:
            if shard.dirty:
                sink(shard)
                shard.dirty = False
        except OSError:
            continue
        registry.decref(shard)
        n += 1
    return n


def main() -> None:
    reg = ShardRegistry(lambda n: n.encode() * 3, 8)
    router = Router(reg)
    req = SwapRequest("r")
    router.submit(req, ["a", "b"])
    router.retarget_to(req, "c")
    router.retarget_to(req, "d")
    router.set_default("a")
    router.set_default("a")
    router.start(2)
    router.close()
    checksum(reg, "ab")
    smallest(reg, ["a", "bb", "c"])
    touch_dirty(reg, "abc", lambda s: None)
    assert reg.referenced() == 0
    biggest(reg, ["a", "bb", "ccc"])
    diff(reg, "a", "a")
    print(reg.referenced())


if __name__ == "__main__":
    main()
