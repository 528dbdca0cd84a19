"""Spill and fetch of KV spans between device, host slabs and files."""
import contextlib
from collections import OrderedDict
from typing import Optional

from .slabs import QuotaDepot, Slab


class Lodging:
    def __init__(self, depot: QuotaDepot, tenant: str) -> None:
        self._depot = depot
        self._tenant = tenant

    def lodge(self, nbytes: int) -> Optional[Slab]:
        return self._depot.check_any(self._tenant, max(nbytes - 1, 1).bit_length())  # clean: handed to the caller

    def dislodge(self, slab: Slab) -> None:
        self._depot.give_slab(slab)

    @contextlib.contextmanager
    def bounce(self, nbytes: int):
        slab = self.lodge(nbytes)  # clean: near miss, None needs no dislodge, the rest is in finally
        if slab is None:
            yield None
            return
        try:
            yield slab
        finally:
            self.dislodge(slab)


class HostTier:
    def __init__(self, lodging: Lodging, root: str, capacity: int) -> None:
        self.lodging, self.root, self.capacity = lodging, root, capacity
        self.spans: OrderedDict[str, Slab] = OrderedDict()

    def spill(self, key: str, payload: bytes) -> bool:
        slab = self.lodging.lodge(len(payload))  # clean: near miss, whatever spans[key] held is dislodged
        if slab is None:
            return False
        slab.data[:len(payload)] = payload
        old = self.spans.pop(key, None)
        if old is not None:
            self.lodging.dislodge(old)
        self.spans[key] = slab
        while len(self.spans) > self.capacity:
            _, oldest = self.spans.popitem(last=False)
            self.lodging.dislodge(oldest)
        return True

    def promote(self, key: str) -> Optional[Slab]:
        slab = self.lodging.lodge(1 << 16)  # leak: a missing file is handled without dislodge
        if slab is None:
            return None
        try:
            source = open(f"{self.root}/{key}", "rb")  # clean: closed after the read
        except FileNotFoundError:
            return None
        source.readinto(slab.data)
        source.close()
        return slab

    def preload(self, key: str) -> None:
        if key not in self.spans:
            slab = self.promote(key)  # clean: near miss, stored in spans, flush() dislodges
            if slab is not None:
                self.spans[key] = slab

    def peek(self, key: str, nbytes: int) -> bytes:
        slab = self.promote(key)  # leak: bytes are copied out, the slab is dropped
        return bytes(slab.data[:nbytes]) if slab is not None else b""

    def digest(self, payload: bytes, hasher) -> Optional[int]:
        with self.lodging.bounce(len(payload)) as slab:  # clean: returns leave through the context manager
            if slab is None:
                return None
            slab.data[:len(payload)] = payload
            return hasher(slab.data)

    def flush(self) -> None:
        while self.spans:
            _, slab = self.spans.popitem()
            self.lodging.dislodge(slab)
