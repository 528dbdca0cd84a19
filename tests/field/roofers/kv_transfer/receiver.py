from __future__ import annotations

from contextlib import contextmanager
from typing import Callable, Iterator, Optional

from .registry import MemoryRegistry, Region


class KVReceiver:
    def __init__(self, registry: MemoryRegistry) -> None:
        self.registry = registry
        self._expected: dict[str, Region] = {}

    def expect(self, rid: str, buf: bytearray) -> Region:
        region = self.registry.register(buf)  # leak: cancel drops the entry without deregistering
        self._expected[rid] = region
        return region

    def arrived(self, rid: str) -> Optional[int]:
        region = self._expected.pop(rid, None)
        if region is None:
            return None
        self.registry.deregister(region)
        return region.length

    def cancel(self, rid: str) -> bool:
        return self._expected.pop(rid, None) is not None

    @contextmanager
    def window(self, buf: bytearray) -> Iterator[Region]:
        region = self.registry.register(buf)  # clean: finally
        try:
            yield region
        finally:
            self.registry.deregister(region)

    def receive(self, buf: bytearray, pull: Callable[[int], int]) -> int:
        with self.window(buf) as region:  # clean: with
            return pull(region.rkey)

    def probe(self, buf: bytearray, pull: Callable[[int], int]) -> bool:
        region = self.registry.register(buf)  # leak: kept when nothing was pulled
        if pull(region.rkey) == 0:
            return False
        self.registry.deregister(region)
        return True
