"""One-sided transfers of KV pages between prefill and decode nodes."""
from __future__ import annotations

import logging
import time
from collections import deque
from typing import Callable, Deque, Dict, List, Optional, Tuple

log = logging.getLogger("rdma")


class LinkDown(Exception):
    pass


class RegionError(Exception):
    pass


class MemoryKey:
    def __init__(self, lkey: int, addr: int, length: int):
        self.lkey = lkey
        self.addr = addr
        self.length = length


class Registry:
    """Registered memory regions; the NIC has a bounded table."""

    def __init__(self, limit: int = 16):
        self.limit = limit
        self._live: Dict[int, MemoryKey] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._live)

    def register(self, addr: int, length: int) -> MemoryKey:
        if len(self._live) >= self.limit:
            raise RegionError("region table full")
        key = MemoryKey(self._next, addr, length)
        self._next += 1
        self._live[key.lkey] = key
        return key

    def deregister(self, key: MemoryKey) -> None:
        del self._live[key.lkey]


class Credits:
    """Send credits granted by the peer."""

    def __init__(self, initial: int):
        self.balance = initial

    def take(self, n: int = 1) -> bool:
        if self.balance < n:
            return False
        self.balance -= n
        return True

    def refund(self, n: int = 1) -> None:
        self.balance += n


class Wire:
    def __init__(self):
        self.log: List[Tuple[int, int]] = []
        self.down = False

    def write(self, key: MemoryKey, remote: int) -> None:
        if self.down:
            raise LinkDown()
        self.log.append((key.addr, remote))


class Completion:
    def __init__(self, key: MemoryKey, credits: int, on_done: Optional[Callable[[bool], None]]):
        self.key = key
        self.credits = credits
        self.on_done = on_done


class Endpoint:
    def __init__(self, registry: Registry, credits: Credits, wire: Wire):
        self.registry = registry
        self.credits = credits
        self.wire = wire
        self._cq: Deque[Completion] = deque()
        self._cached: Dict[int, MemoryKey] = {}
        self._scratch = registry.register(0, 4096)  # clean: held for the endpoint's life, close deregisters it
        self._hot: Optional[MemoryKey] = None

    # -- synchronous ------------------------------------------------------
    def put_retry(self, addr: int, length: int, remote: int, tries: int = 3) -> bool:
        for attempt in range(tries):
            if not self.credits.take():  # leak: an attempt that finds the link down never refunds its credit
                time.sleep(0)
                continue
            key = self.registry.register(addr, length)  # clean: near miss, deregistered in the finally of every attempt
            try:
                self.wire.write(key, remote)
            except LinkDown:
                log.info("attempt %d: link down", attempt)
                continue
            finally:
                self.registry.deregister(key)
            self.credits.refund()
            return True
        return False

    def put_retry_registered(self, addr: int, length: int, remote: int, tries: int = 3) -> bool:
        key = None
        while tries > 0:
            tries -= 1
            key = self.registry.register(addr, length)  # leak: every retry registers again over the key of the failed one
            try:
                self.wire.write(key, remote)
                break
            except LinkDown:
                continue
        else:
            return False
        self.registry.deregister(key)
        return True

    # -- asynchronous -----------------------------------------------------
    def post(self, addr: int, length: int, remote: int, on_done: Optional[Callable[[bool], None]] = None) -> bool:
        if not self.credits.take(2):  # leak: the failed registration returns without a refund
            return False
        try:
            key = self.registry.register(addr, length)  # clean: goes with the completion, poll deregisters it
        except RegionError:
            return False
        self.wire.write(key, remote)
        self._cq.append(Completion(key, 2, on_done))
        return True

    def post_checked(self, addr: int, length: int, remote: int) -> bool:
        if not self.credits.take():  # clean: near miss, each failing way refunds it, else the completion carries it
            return False
        try:
            key = self.registry.register(addr, length)  # clean: near miss, the LinkDown way deregisters it
        except RegionError:
            self.credits.refund()
            return False
        try:
            self.wire.write(key, remote)
        except LinkDown:
            self.registry.deregister(key)
            self.credits.refund()
            return False
        self._cq.append(Completion(key, 1, None))
        return True

    def poll(self, limit: int = 8) -> int:
        n = 0
        while self._cq and n < limit:
            done = self._cq.popleft()
            self.registry.deregister(done.key)
            self.credits.refund(done.credits)
            if done.on_done is not None:
                done.on_done(True)
            n += 1
        return n

    # -- registration cache -------------------------------------------------
    def key_for(self, addr: int, length: int) -> MemoryKey:
        """A cached registration; grown in place when the range is longer."""
        key = self._cached.get(addr)
        if key is not None and key.length >= length:
            return key
        fresh = self.registry.register(addr, length)  # leak: it overwrites the shorter registration in the cache without a deregister
        self._cached[addr] = fresh
        return fresh

    def drop_range(self, lo: int, hi: int) -> int:
        gone = [a for a in self._cached if lo <= a < hi]
        for a in gone:
            self.registry.deregister(self._cached.pop(a))
        return len(gone)

    def set_hot(self, addr: int, length: int) -> None:
        if self._hot is not None and self._hot.addr == addr:
            return
        fresh = self.registry.register(addr, length)  # clean: near miss, replaces the older one after it is deregistered
        if self._hot is not None:
            self.registry.deregister(self._hot)
        self._hot = fresh

    def push_pages(self, pages: List[Tuple[int, int]], remote: int) -> int:
        """Gather write; registers each page for the duration."""
        keys: List[MemoryKey] = []
        try:
            for addr, length in pages:
                if length == 0:
                    continue
                keys.append(self.registry.register(addr, length))  # clean: near miss, all collected ones are deregistered in the finally
            for i, key in enumerate(keys):
                self.wire.write(key, remote + i)
            return len(keys)
        except (RegionError, LinkDown):
            return 0
        finally:
            for key in keys:
                self.registry.deregister(key)

    def burst(self, remote: int, count: int) -> int:
        """Spend up to `count` credits on scratch writes."""
        sent = 0
        while sent < count and self.credits.take():  # clean: near miss, all taken ones are refunded together after the loop
            self.wire.write(self._scratch, remote)
            sent += 1
        self.credits.refund(sent)
        return sent

    def close(self) -> None:
        while self._cq:
            self.poll()
        self.drop_range(0, 1 << 62)
        if self._hot is not None:
            self.registry.deregister(self._hot)
            self._hot = None
        self.registry.deregister(self._scratch)


if __name__ == "__main__":
    ep = Endpoint(Registry(), Credits(8), Wire())
    print(ep.put_retry(1, 2, 3), ep.put_retry_registered(1, 2, 3))
    print(ep.post(1, 2, 3, print), ep.post_checked(2, 2, 3), ep.push_pages([(1, 1), (2, 0)], 9), ep.burst(1, 20))
    ep.key_for(5, 1), ep.set_hot(1, 1), ep.set_hot(2, 2), ep.set_hot(2, 2), ep.poll(), ep.close()
    print(len(ep.registry), ep.credits.balance)
