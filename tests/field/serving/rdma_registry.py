"""Memory registration for one-sided KV reads. Keys are scarce on the NIC, so they are cached by address."""
from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Tuple

import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemKey:
    lkey: int
    addr: int
    length: int


class Nic:
    """Stand-in for the verbs layer."""

    def __init__(self, max_keys: int = 256) -> None:
        self._unused = list(range(max_keys))
        self._table: Dict[int, MemKey] = {}

    def register(self, t: torch.Tensor) -> MemKey:
        if not self._unused:
            raise OSError("out of memory keys")
        key = MemKey(self._unused.pop(), t.data_ptr(), t.numel() * t.element_size())
        self._table[key.lkey] = key
        return key

    def deregister(self, key: MemKey) -> None:
        del self._table[key.lkey]
        self._unused.append(key.lkey)

    def read(self, key: MemKey, offset: int, n: int) -> bool:
        return key.lkey in self._table and offset + n <= key.length


class RegistrationCache:
    def __init__(self, nic: Nic, capacity: int = 64) -> None:
        self.nic = nic
        self.capacity = capacity
        self._by_addr: Dict[Tuple[int, int], MemKey] = {}

    def lookup(self, t: torch.Tensor) -> MemKey:
        ident = (t.data_ptr(), t.numel())
        key = self._by_addr.get(ident)
        if key is None:
            if len(self._by_addr) >= self.capacity:
                old = next(iter(self._by_addr))
                self.nic.deregister(self._by_addr.pop(old))
            key = self.nic.register(t)  # clean: cached, evicted or deregistered by reset
            self._by_addr[ident] = key
        return key

    def reset(self) -> None:
        while self._by_addr:
            _, key = self._by_addr.popitem()
            self.nic.deregister(key)


class ForgetfulCache:
    def __init__(self, nic: Nic) -> None:
        self.nic = nic
        self._by_addr: Dict[int, MemKey] = {}

    def lookup(self, t: torch.Tensor) -> MemKey:
        if t.data_ptr() not in self._by_addr:
            self._by_addr[t.data_ptr()] = self.nic.register(t)  # leak: trim and reset clear the table without deregistering
        return self._by_addr[t.data_ptr()]

    def trim(self, keep: int) -> None:
        self._by_addr = dict(list(self._by_addr.items())[-keep:])

    def reset(self) -> None:
        self._by_addr.clear()


class Endpoint:
    def __init__(self, nic: Nic, on_error: Optional[Callable[[str], None]] = None) -> None:
        self.nic = nic
        self.on_error = on_error
        self.regions: List[MemKey] = []

    def expose(self, layers: List[torch.Tensor]) -> List[int]:
        for t in layers:
            self.regions.append(self.nic.register(t))  # clean: all regions are deregistered in close
        return [k.lkey for k in self.regions]

    def close(self) -> None:
        for key in self.regions:
            self.nic.deregister(key)
        self.regions.clear()

    def pull(self, t: torch.Tensor, offset: int) -> bool:
        key = self.nic.register(t)  # leak: with an error callback the failed read returns early
        ok = self.nic.read(key, offset, t.numel())
        if not ok and self.on_error is not None:
            self.on_error(f"read at {offset} refused")
            return False
        self.nic.deregister(key)
        return ok

    def pull_pages(self, pages: List[torch.Tensor], offset: int) -> int:
        n = 0
        for page in pages:
            key = self.nic.register(page)  # clean: near miss, the break comes after the deregistration
            ok = self.nic.read(key, offset, page.numel())
            self.nic.deregister(key)
            if not ok:
                break
            n += 1
        return n

    def pull_tied(self, t: torch.Tensor) -> MemKey:
        key = self.nic.register(t)  # clean: near miss, the finalizer of the tensor deregisters it
        weakref.finalize(t, self.nic.deregister, key)
        return key

    def pull_async(self, t: torch.Tensor, offset: int, defer: Callable[[Callable[[], None]], None]) -> None:
        key = self.nic.register(t)  # clean: the deferred closure deregisters it

        def _complete() -> None:
            self.nic.read(key, offset, t.numel())
            self.nic.deregister(key)

        defer(_complete)

    def pull_later(self, t: torch.Tensor, offset: int, defer: Callable[[Callable[[], None]], None]) -> None:
        key = self.nic.register(t)  # leak: the closure that is deferred reads only
        defer(lambda: logger.info("%s", self.nic.read(key, offset, t.numel())))

    def swap(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        ka = self.nic.register(a)  # leak: stays registered when b cannot be
        try:
            kb = self.nic.register(b)  # clean: deregistered below
        except OSError as e:
            logger.error("swap: %s", e)
            return False
        ok = self.nic.read(ka, 0, 1) and self.nic.read(kb, 0, 1)
        self.nic.deregister(kb)
        self.nic.deregister(ka)
        return ok
