"""Registration of memory regions with the NIC. Keys are few, pinned bytes are limited."""
import contextlib
import threading
from typing import NamedTuple


class PinLimit(RuntimeError):
    pass


class Misaligned(ValueError):
    pass


class Region(NamedTuple):
    key: int
    addr: int
    nbytes: int


class RegionTable:
    def __init__(self, nic, max_keys: int = 4096, max_bytes: int = 64 << 30):
        self.nic = nic
        self.max_bytes = max_bytes
        self._keys = list(range(max_keys))
        self._pinned = 0
        self._lock = threading.Lock()

    def register(self, addr: int, nbytes: int) -> Region:
        with self._lock:
            if not self._keys or self._pinned + nbytes > self.max_bytes:
                raise PinLimit(f"{nbytes} bytes on top of {self._pinned}")
            key = self._keys.pop()  # clean: returned inside the region
            self._pinned += nbytes
        self.nic.reg_mr(key, addr, nbytes)
        return Region(key, addr, nbytes)

    def register_strided(self, addr: int, rows: int, pitch: int) -> Region:
        with self._lock:
            if not self._keys:
                raise PinLimit("keys")
            key = self._keys.pop()  # leak: Misaligned is raised after the key was popped
            if pitch % 64:
                raise Misaligned(f"pitch {pitch}")
            self._pinned += rows * pitch
        self.nic.reg_mr(key, addr, rows * pitch)
        return Region(key, addr, rows * pitch)

    def try_register(self, addr: int, nbytes: int):
        try:
            return self.register(addr, nbytes)  # clean: returned to the caller
        except PinLimit:
            return None

    def deregister(self, region: Region) -> None:
        self.nic.dereg_mr(region.key)
        with self._lock:
            self._keys.append(region.key)
            self._pinned -= region.nbytes

    @contextlib.contextmanager
    def registered(self, addr: int, nbytes: int):
        region = self.register(addr, nbytes)  # clean: deregistered in the finally
        try:
            yield region
        finally:
            self.deregister(region)
