"""Memory registration for KV transfer. Regions are registered with the NIC and must be deregistered."""
import logging
from contextlib import suppress
from typing import Any, Dict, List, NamedTuple, Optional

import torch

logger = logging.getLogger("transfer.rdma")


class RegistrationError(RuntimeError):
    pass


class Region(NamedTuple):
    key: int
    addr: int
    length: int


class Nic:
    MAX_REGIONS = 128

    def __init__(self) -> None:
        self._regions: Dict[int, Region] = {}
        self._next = 1

    def register(self, t: torch.Tensor) -> Region:
        if len(self._regions) >= self.MAX_REGIONS:
            raise RegistrationError("out of memory regions")
        r = Region(self._next, t.data_ptr(), t.numel() * t.element_size())
        self._next += 1
        self._regions[r.key] = r
        return r

    def deregister(self, r: Region) -> None:
        del self._regions[r.key]

    def write(self, local: Region, remote_key: int) -> int:
        return local.length if remote_key > 0 else -1


class TransferEngine:
    def __init__(self, nic: Nic) -> None:
        self.nic = nic
        self.kv_regions: List[Region] = []
        self.by_name: Dict[str, Region] = {}
        self.scratch: Optional[Region] = None

    def register_kv_caches(self, caches: List[torch.Tensor]) -> None:
        for cache in caches:
            self.kv_regions.append(self.nic.register(cache))  # clean: close() deregisters the list

    def register_scratch(self, size: int) -> None:
        if self.scratch is not None:
            return
        self.scratch = self.nic.register(torch.empty(size, dtype=torch.uint8))  # leak: close() does not know the scratch region

    def register_named(self, tensors: Dict[str, torch.Tensor]) -> None:
        tensors = {n: t for n, t in tensors.items() if n not in self.by_name}
        done: List[Region] = []
        try:
            for name, t in tensors.items():
                r = self.nic.register(t)  # clean: near miss, the handler rolls back what was done
                done.append(r)
        except RegistrationError:
            for r in done:
                self.nic.deregister(r)
            raise
        self.by_name.update(zip(tensors, done))

    def register_pairs(self, keys: List[torch.Tensor], values: List[torch.Tensor]) -> bool:
        regions: List[Region] = []
        try:
            for k, v in zip(keys, values):
                regions.append(self.nic.register(k))  # leak: the handler answers False and the list is gone
                regions.append(self.nic.register(v))  # leak: the handler answers False and the list is gone
        except RegistrationError as e:
            logger.warning("falling back to tcp: %s", e)
            return False
        self.kv_regions += regions
        return True

    def write_once(self, t: torch.Tensor, remote_key: int) -> int:
        r = self.nic.register(t)  # clean: deregistered on the one way out
        n = self.nic.write(r, remote_key)
        self.nic.deregister(r)
        return n

    def write_checked(self, t: torch.Tensor, remote_key: int) -> int:
        r = self.nic.register(t)  # leak: the failed write raises with the region registered
        n = self.nic.write(r, remote_key)
        if n < 0:
            raise OSError("write failed")
        self.nic.deregister(r)
        return n

    def write_best_effort(self, t: torch.Tensor, remote_key: int) -> int:
        sent = 0
        with suppress(RegistrationError):
            r = self.nic.register(t)  # clean: near miss, suppress only swallows the failed registration
            sent = self.nic.write(r, remote_key)
            self.nic.deregister(r)
        return sent

    def scatter(self, tensors: List[torch.Tensor], remote_keys: List[int]) -> int:
        regions = [self.nic.register(t) for t in tensors]  # leak: only those with a remote key are deregistered
        total = 0
        for r, key in zip(regions, remote_keys):
            if key == 0:
                continue
            total += self.nic.write(r, key)
            self.nic.deregister(r)
        return total

    def scatter_all(self, tensors: List[torch.Tensor], remote_keys: List[int]) -> int:
        regions = [self.nic.register(t) for t in tensors]  # clean: near miss, skipped ones are covered by the second loop
        total = 0
        for r, key in zip(regions, remote_keys):
            if key == 0:
                continue
            total += self.nic.write(r, key)
        for r in regions:
            self.nic.deregister(r)
        return total

    def replace(self, name: str, t: torch.Tensor) -> Region:
        old = self.by_name.get(name)
        region = self.nic.register(t)  # clean: near miss, the former entry is deregistered before it is replaced
        if old is not None:
            self.nic.deregister(old)
        self.by_name[name] = region
        return region

    def handshake(self, peer: Dict[str, Any]) -> Optional[int]:
        meta = self.nic.register(torch.zeros(64, dtype=torch.uint8))  # leak: a peer with another version ends the function early
        if peer.get("version") != 2:
            return None
        n = self.nic.write(meta, peer["key"])
        self.nic.deregister(meta)
        return n

    def close(self) -> None:
        for r in self.kv_regions:
            self.nic.deregister(r)
        self.kv_regions = []
        for r in self.by_name.values():
            self.nic.deregister(r)
        self.by_name = {}
