"""LoRA adapters on the device: counted references and a lock for each slab."""
from __future__ import annotations

import threading
from typing import Any, Callable, Iterator, Optional


class Adapter:
    def __init__(self, name: str, rank: int) -> None:
        self.name = name
        self.rank = rank
        self._users = 0

    def retain(self) -> "Adapter":
        self._users += 1
        return self

    def drop(self) -> None:
        self._users -= 1
        if self._users < 0:
            raise AssertionError(f"{self.name} over-released")

    @property
    def idle(self) -> bool:
        return self._users == 0


class AdapterRegistry:
    def __init__(self, load: Callable[[str], Adapter], capacity: int = 16) -> None:
        self._load = load
        self._capacity = capacity
        self._by_name: dict[str, Adapter] = {}
        self._mu = threading.Lock()
        self._default = load("base").retain()  # clean: held for the life of the process

    def checkout_adapter(self, name: Optional[str]) -> Optional[Adapter]:
        """The caller drops what it gets."""
        if name is None:
            return self._default.retain()  # clean: returned
        self._mu.acquire()  # clean: finally
        try:
            a = self._by_name.get(name)
            if a is None:
                if len(self._by_name) >= self._capacity and not self._evict_one():
                    return None
                a = self._by_name[name] = self._load(name)
            return a.retain()  # clean: returned
        finally:
            self._mu.release()

    def _evict_one(self) -> bool:
        for name, a in self._by_name.items():
            if a.idle:
                del self._by_name[name]
                return True
        return False

    def unload(self, name: str) -> bool:
        self._mu.acquire()  # leak: busy adapters return with the lock held
        a = self._by_name.get(name)
        if a is not None and not a.idle:
            return False
        self._by_name.pop(name, None)
        self._mu.release()
        return True

    def names(self) -> list[str]:
        self._mu.acquire()  # clean: released before the only return
        out = sorted(self._by_name)
        self._mu.release()
        return out


class LoraRequest:
    def __init__(self, rid: str, adapter: Optional[Adapter] = None) -> None:
        self.rid = rid
        self.adapter = adapter

    def finish(self) -> None:
        if self.adapter is not None:
            self.adapter.drop()
            self.adapter = None


class LoraScheduler:
    def __init__(self, registry: AdapterRegistry, max_rank: int) -> None:
        self.registry = registry
        self.max_rank = max_rank
        self.active: dict[str, LoraRequest] = {}

    def submit(self, rid: str, name: Optional[str]) -> bool:
        a = self.registry.checkout_adapter(name)  # leak: too large a rank returns without drop
        if a is None:
            return False
        if a.rank > self.max_rank:
            return False
        self.active[rid] = LoraRequest(rid, a)
        return True

    def resubmit(self, rid: str, name: Optional[str]) -> bool:
        a = self.registry.checkout_adapter(name)  # clean: moved into the request, finish drops it
        if a is None:
            return False
        previous = self.active.get(rid)
        if previous is not None:
            previous.finish()
            previous.adapter = a
        else:
            self.active[rid] = LoraRequest(rid, a)
        return True

    def switch(self, rid: str, name: str) -> bool:
        """Change the adapter of a request in the middle of a conversation."""
        a = self.registry.checkout_adapter(name)  # clean: near miss, swapped in and the old one dropped
        if a is None:
            return False
        req = self.active.get(rid)
        if req is None:
            a.drop()
            return False
        a, req.adapter = req.adapter, a
        if a is not None:
            a.drop()
        return True

    def validate(self, names: list[str]) -> bool:
        for name in names:
            a = self.registry.checkout_adapter(name)  # leak: the failing adapter is not dropped
            if a is None:
                return False
            if a.rank > self.max_rank:
                break
            a.drop()
        else:
            return True
        return False

    def group(self, names: list[str]) -> Optional[list[Adapter]]:
        """All of them or none; drop each when done."""
        got: list[Adapter] = []
        for name in names:
            a = self.registry.checkout_adapter(name)  # clean: near miss, all dropped when one is missing
            if a is None:
                while got:
                    got.pop().drop()
                return None
            got.append(a)
        return got

    def merge_delta(self, names: list[str], fold: Callable[[list[Adapter]], Any]) -> Any:
        adapters = self.group(names)  # leak: only the first is dropped
        if not adapters:
            return None
        result = fold(adapters)
        adapters[0].drop()
        return result

    def warm(self, names: list[str], touch: Callable[[Adapter], None]) -> None:
        adapters = self.group(names)  # clean: each dropped in the loop
        for a in adapters or ():
            touch(a)
            a.drop()

    def stream_ranks(self, names: list[str]) -> Iterator[int]:
        for name in names:
            a = self.registry.checkout_adapter(name)  # clean: near miss, finally runs when the generator is closed
            if a is None:
                continue
            try:
                yield a.rank
            finally:
                a.drop()

    def finish(self, rid: str) -> None:
        req = self.active.pop(rid, None)
        if req is not None:
            req.finish()


if __name__ == "__main__":
    reg = AdapterRegistry(lambda n: Adapter(n, 8))
    sch = LoraScheduler(reg, 16)
    assert sch.resubmit("a", "x") and sch.switch("a", "y")
    sch.finish("a")
    assert list(sch.stream_ranks(["x", "y"])) == [8, 8]
    assert reg.unload("x")
