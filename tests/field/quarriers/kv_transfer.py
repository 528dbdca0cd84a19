"""Disaggregated prefill: registered memory regions for KV hand-off to decode workers."""
from __future__ import annotations

import threading
from typing import Any, Callable, Optional


class LinkDown(RuntimeError):
    pass


class RegionTable:
    def __init__(self, max_regions: int) -> None:
        self._ids = list(range(max_regions))
        self._regions: dict[int, tuple[int, int]] = {}

    def register(self, addr: int, nbytes: int) -> int:
        """Returns a region key, or -1 when the NIC is out of keys."""
        if not self._ids:
            return -1
        key = self._ids.pop()
        self._regions[key] = (addr, nbytes)
        return key

    def deregister(self, key: int) -> None:
        del self._regions[key]
        self._ids.append(key)

    def count(self) -> int:
        return len(self._regions)


class Region:
    """Owns one registration until close()."""

    def __init__(self, table: RegionTable, addr: int, nbytes: int) -> None:
        self.table = table
        self.key = table.register(addr, nbytes)  # clean: close deregisters it

    @property
    def valid(self) -> bool:
        return self.key >= 0

    def close(self) -> None:
        if self.key >= 0:
            self.table.deregister(self.key)
            self.key = -1

    def __enter__(self) -> "Region":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


class KVSender:
    def __init__(self, table: RegionTable, write: Callable[[int, str], None]) -> None:
        self.table = table
        self.write = write
        self.credits = threading.Semaphore(4)
        self._by_request: dict[str, list[int]] = {}

    def send_block(self, addr: int, nbytes: int, peer: str) -> bool:
        with Region(self.table, addr, nbytes) as region:  # clean: with
            if not region.valid:
                return False
            self.write(region.key, peer)
            return True

    def send_layers(self, rid: str, addrs: list[int], nbytes: int) -> bool:
        """Register every layer; complete() deregisters them when the peer has read."""
        keys: list[int] = []
        for addr in addrs:
            key = self.table.register(addr, nbytes)  # leak: the earlier layers stay registered when a later one fails
            if key < 0:
                return False
            keys.append(key)
        self._by_request.setdefault(rid, []).extend(keys)
        return True

    def send_layers_atomic(self, rid: str, addrs: list[int], nbytes: int) -> bool:
        keys: list[int] = []
        ok = False
        try:
            for addr in addrs:
                key = self.table.register(addr, nbytes)  # clean: near miss, finally rolls back unless ok
                if key < 0:
                    return False
                keys.append(key)
            self._by_request.setdefault(rid, []).extend(keys)
            ok = True
            return True
        finally:
            if not ok:
                for key in keys:
                    self.table.deregister(key)

    def complete(self, rid: str) -> None:
        for key in self._by_request.pop(rid, []):
            self.table.deregister(key)

    def send_retry(self, addr: int, nbytes: int, peers: list[str]) -> Optional[str]:
        key = self.table.register(addr, nbytes)  # leak: when every peer is down the key stays registered
        if key < 0:
            return None
        for peer in peers:
            try:
                self.write(key, peer)
            except LinkDown:
                continue
            self.table.deregister(key)
            return peer
        return None

    def send_throttled(self, key: int, peer: str) -> bool:
        if not self.credits.acquire(timeout=1.0):  # clean: near miss, nothing held on timeout, finally otherwise
            return False
        try:
            self.write(key, peer)
        except LinkDown:
            return False
        finally:
            self.credits.release()
        return True

    def probe(self, addr: int, peer: str) -> bool:
        region = Region(self.table, addr, 64)  # leak: a dead link returns without close
        try:
            self.write(region.key, peer)
        except LinkDown:
            return False
        region.close()
        return True

    def exchange(self, src: int, dst: int, nbytes: int, peer: str) -> bool:
        a = Region(self.table, src, nbytes)  # clean: finally
        b: Optional[Region] = None
        try:
            b = Region(self.table, dst, nbytes)  # clean: near miss, finally tests for None
            if not (a.valid and b.valid):
                return False
            self.write(a.key, peer)
            self.write(b.key, peer)
            return True
        finally:
            a.close()
            if b is not None:
                b.close()


if __name__ == "__main__":
    t = RegionTable(3)
    s = KVSender(t, lambda k, p: None)
    assert s.send_block(0, 8, "p") and not s.send_layers_atomic("r", [1, 2, 3, 4], 8)
    assert s.send_layers("r", [1, 2], 8)
    s.complete("r")
    assert s.exchange(1, 2, 3, "p") and s.send_throttled(0, "p") and s.probe(1, "p")
    assert t.count() == 0
