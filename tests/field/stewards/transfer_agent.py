from __future__ import annotations

import enum
import itertools
import logging
import time
from dataclasses import dataclass, field
from typing import Optional, Sequence

import torch

log = logging.getLogger("kv.transfer")


class XferState(enum.Enum):
    PENDING = "pending"
    DONE = "done"
    ERR = "err"


class RegistrationError(Exception):
    pass


@dataclass(frozen=True)
class MemRegion:
    key: int
    addr: int
    length: int


class MemoryRegistry:
    def __init__(self, max_regions: int) -> None:
        self.max_regions = max_regions
        self._regions: dict[int, MemRegion] = {}
        self._keys = itertools.count(1)

    def register(self, addr: int, length: int) -> MemRegion:
        if len(self._regions) >= self.max_regions:
            raise RegistrationError(f"{len(self._regions)} regions registered")
        region = MemRegion(next(self._keys), addr, length)
        self._regions[region.key] = region
        return region

    def deregister(self, region: MemRegion) -> None:
        self._regions.pop(region.key, None)


@dataclass
class XferHandle:
    handle_id: int
    peer: str
    state: XferState = XferState.PENDING


class XferEngine:
    def __init__(self, slots: int) -> None:
        self._free_ids = list(range(slots))
        self._active: dict[int, XferHandle] = {}

    def create_xfer(self, peer: str) -> Optional[XferHandle]:
        if not self._free_ids:
            return None
        handle = XferHandle(self._free_ids.pop(), peer)
        self._active[handle.handle_id] = handle
        return handle

    def release_xfer(self, handle: XferHandle) -> None:
        del self._active[handle.handle_id]
        self._free_ids.append(handle.handle_id)

    def post(self, handle: XferHandle, src: Sequence[MemRegion], dst: Sequence[int]) -> bool:
        return len(src) == len(dst)

    def poll(self, handle: XferHandle) -> XferState:
        return handle.state


@dataclass
class PendingSend:
    request_id: str
    handle: XferHandle
    regions: list[MemRegion] = field(default_factory=list)
    deadline: float = 0.0


class KVConnector:
    def __init__(self, registry: MemoryRegistry, engine: XferEngine, timeout: float = 30.0) -> None:
        self.registry = registry
        self.engine = engine
        self.timeout = timeout
        self._cache_regions: list[MemRegion] = []
        self._aux_region: Optional[MemRegion] = None
        self._sends: dict[str, PendingSend] = {}

    def register_kv_caches(self, caches: dict[str, torch.Tensor]) -> None:
        for name, tensor in caches.items():
            self._cache_regions.append(
                self.registry.register(tensor.data_ptr(), tensor.nbytes)  # clean: kept for the connector's life, shutdown() deregisters the list
            )
            log.debug("registered %s", name)

    def register_aux(self, aux: torch.Tensor) -> None:
        self._aux_region = self.registry.register(aux.data_ptr(), aux.nbytes)  # leak: shutdown() forgets the aux region

    def try_register(self, tensors: Sequence[torch.Tensor]) -> Optional[list[MemRegion]]:
        regions: list[MemRegion] = []
        try:
            for t in tensors:
                regions.append(self.registry.register(t.data_ptr(), t.nbytes))  # clean: near miss, a full registry rolls the earlier ones back
        except RegistrationError:
            for region in regions:
                self.registry.deregister(region)
            return None
        return regions

    def start_send(self, request_id: str, peer: str, tensors: Sequence[torch.Tensor], dst: Sequence[int]) -> bool:
        handle = self.engine.create_xfer(peer)  # leak: not released when the registration fails
        if handle is None:
            return False
        regions = self.try_register(tensors)  # clean: recorded in the pending send or deregistered when the post is refused
        if regions is None:
            return False
        if not self.engine.post(handle, regions, dst):
            self._drop(regions)
            self.engine.release_xfer(handle)
            return False
        self._sends[request_id] = PendingSend(request_id, handle, regions, time.monotonic() + self.timeout)
        return True

    def _drop(self, regions: Sequence[MemRegion]) -> None:
        for region in regions:
            self.registry.deregister(region)

    def poll_sends(self) -> tuple[list[str], list[str]]:
        done: list[str] = []
        failed: list[str] = []
        now = time.monotonic()
        for request_id, send in list(self._sends.items()):
            state = self.engine.poll(send.handle)
            if state is XferState.PENDING and now < send.deadline:
                continue
            (done if state is XferState.DONE else failed).append(request_id)
            del self._sends[request_id]
            self._drop(send.regions)
            self.engine.release_xfer(send.handle)
        return done, failed

    def send_metadata(self, peer: str, blob: torch.Tensor, dst: int) -> bool:
        try:
            region = self.registry.register(blob.data_ptr(), blob.nbytes)  # clean: near miss, all ways after it pass the finally
        except RegistrationError:
            return False
        try:
            handle = self.engine.create_xfer(peer)  # leak: an error state returns with the handle still active
            if handle is None:
                return False
            if not self.engine.post(handle, [region], [dst]):
                self.engine.release_xfer(handle)
                return False
            while (state := self.engine.poll(handle)) is XferState.PENDING:
                time.sleep(0.001)
            if state is XferState.ERR:
                log.warning("metadata for %s failed", peer)
                return False
            self.engine.release_xfer(handle)
            return True
        finally:
            self.registry.deregister(region)

    def send_with_retry(self, peer: str, region: MemRegion, dst: int, attempts: int = 3) -> bool:
        for attempt in range(attempts):
            handle = self.engine.create_xfer(peer)  # leak: a refused post goes to the next attempt with a new handle
            if handle is None:
                time.sleep(0.01 * attempt)
                continue
            if not self.engine.post(handle, [region], [dst]):
                continue
            while self.engine.poll(handle) is XferState.PENDING:
                time.sleep(0.001)
            ok = handle.state is XferState.DONE
            self.engine.release_xfer(handle)
            if ok:
                return True
        return False

    def ping(self, peer: str, attempts: int = 3) -> bool:
        for _ in range(attempts):
            handle = self.engine.create_xfer(peer)  # clean: near miss, continue only where nothing was obtained
            if handle is None:
                continue
            ok = self.engine.post(handle, [], [])
            self.engine.release_xfer(handle)
            if ok:
                return True
        return False

    def shutdown(self) -> None:
        for send in self._sends.values():
            self._drop(send.regions)
            self.engine.release_xfer(send.handle)
        self._sends.clear()
        self._drop(self._cache_regions)
        self._cache_regions.clear()
