"""KV transfer agent: memory registrations, transfer handles and notification slots between two engines."""
from __future__ import annotations

import itertools
import logging
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Optional, Sequence

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Region:
    key: int
    addr: int
    nbytes: int


@dataclass
class XferHandle:
    hid: int
    regions: list[Region]
    state: str = "PROC"


class Agent:
    def __init__(self, name: str, max_handles: int) -> None:
        self.name = name
        self.max_handles = max_handles
        self.registered: dict[int, Region] = {}
        self.handles: dict[int, XferHandle] = {}
        self._ids = itertools.count(1)

    def register(self, addr: int, nbytes: int) -> Region:
        region = Region(next(self._ids), addr, nbytes)
        self.registered[region.key] = region
        return region

    def deregister(self, region: Region) -> None:
        self.registered.pop(region.key)

    def make_xfer(self, regions: Sequence[Region]) -> Optional[XferHandle]:
        if len(self.handles) >= self.max_handles:
            return None
        handle = XferHandle(next(self._ids), list(regions))
        self.handles[handle.hid] = handle
        return handle

    def release_xfer(self, handle: XferHandle) -> None:
        self.handles.pop(handle.hid, None)

    def check(self, handle: XferHandle) -> str:
        return handle.state


class NotifSlots:
    def __init__(self, n: int) -> None:
        self.free: deque[int] = deque(range(n))

    def reserve(self) -> int:
        return self.free.popleft() if self.free else -1

    def cancel(self, slot: int) -> None:
        self.free.append(slot)


@dataclass
class ReqTransfer:
    request_id: str
    handles: list[XferHandle] = field(default_factory=list)
    notif: int = -1
    deadline: float = 0.0


class KVConnector:
    def __init__(self, agent: Agent, notifs: NotifSlots, timeout: float = 30.0) -> None:
        self.agent = agent
        self.notifs = notifs
        self.timeout = timeout
        self.kv_regions: list[Region] = []
        self.meta: Optional[Region] = None
        self.sending: dict[str, ReqTransfer] = {}
        self.recving: dict[str, ReqTransfer] = {}
        self.region_cache: OrderedDict[int, Region] = OrderedDict()

    def register_kv_caches(self, caches: dict[str, tuple[int, int]]) -> None:
        for addr, nbytes in caches.values():
            self.kv_regions.append(self.agent.register(addr, nbytes))  # clean: near miss, kept for the life of the connector and deregistered by shutdown
        self.meta = self.agent.register(0, 4096)  # leak: shutdown deregisters the KV regions and forgets the metadata region

    def cached_region(self, addr: int, nbytes: int) -> Region:
        region = self.region_cache.get(addr)
        if region is not None and region.nbytes >= nbytes:
            self.region_cache.move_to_end(addr)
            return region
        if region is not None:
            self.agent.deregister(region)
        region = self.agent.register(addr, nbytes)  # clean: near miss, the smaller region was deregistered and eviction handles this one
        self.region_cache[addr] = region
        if len(self.region_cache) > 64:
            _, old = self.region_cache.popitem(last=False)
            self.agent.deregister(old)
        return region

    def start_load(self, request_id: str, layers: list[tuple[int, int]]) -> bool:
        req = ReqTransfer(request_id, deadline=time.monotonic() + self.timeout)
        for addr, nbytes in layers:
            handle = self.agent.make_xfer([self.cached_region(addr, nbytes)])  # clean: near miss, earlier handles are rolled back, later ones live in recving
            if handle is None:
                for other in req.handles:
                    self.agent.release_xfer(other)
                return False
            req.handles.append(handle)
        self.recving[request_id] = req
        return True

    def start_save(self, request_id: str, regions: list[Region]) -> bool:
        notif = self.notifs.reserve()  # leak: no handle available returns False with the notification slot reserved
        if notif < 0:
            return False
        handle = self.agent.make_xfer(regions)  # clean: stored in sending, released when done or expired
        if handle is None:
            return False
        self.sending[request_id] = ReqTransfer(request_id, [handle], notif, time.monotonic() + self.timeout)
        return True

    def poll_sending(self) -> list[str]:
        done: list[str] = []
        for rid, req in list(self.sending.items()):
            if all(self.agent.check(h) == "DONE" for h in req.handles) or time.monotonic() > req.deadline:
                for h in req.handles:
                    self.agent.release_xfer(h)
                self.notifs.cancel(req.notif)
                del self.sending[rid]
                done.append(rid)
        return done

    def poll_recving(self) -> list[str]:
        done: list[str] = []
        for rid, req in list(self.recving.items()):
            still = [h for h in req.handles if self.agent.check(h) != "DONE"]
            for h in req.handles:
                if h not in still:
                    self.agent.release_xfer(h)
            req.handles = still
            if not still:
                del self.recving[rid]
                done.append(rid)
        return done

    def push_once(self, addr: int, nbytes: int, spins: int) -> bool:
        region = self.agent.register(addr, nbytes)  # leak: the timeout return releases the handle and not the region
        handle = self.agent.make_xfer([region])  # clean: near miss, released on success and on timeout
        if handle is None:
            self.agent.deregister(region)
            return False
        for _ in range(spins):
            if self.agent.check(handle) == "DONE":
                self.agent.release_xfer(handle)
                self.agent.deregister(region)
                return True
        self.agent.release_xfer(handle)
        return False

    def retry_push(self, regions: list[Region], attempts: int) -> bool:
        for _ in range(attempts):
            handle = self.agent.make_xfer(regions)  # leak: an attempt that ends in ERR is retried without releasing its handle
            if handle is None:
                continue
            if self.agent.check(handle) == "ERR":
                continue
            self.agent.release_xfer(handle)
            return True
        return False

    def handshake(self) -> bool:
        slot = self.notifs.reserve()  # clean: near miss, cancelled before the result is looked at
        if slot < 0:
            return False
        probe = self.agent.make_xfer([])  # clean: near miss, released whenever there is one
        ok = probe is not None and self.agent.check(probe) != "ERR"
        if probe is not None:
            self.agent.release_xfer(probe)
        self.notifs.cancel(slot)
        return ok

    def shutdown(self) -> None:
        for req in itertools.chain(self.sending.values(), self.recving.values()):
            for h in req.handles:
                self.agent.release_xfer(h)
            if req.notif >= 0:
                self.notifs.cancel(req.notif)
        self.sending.clear()
        self.recving.clear()
        for region in self.kv_regions:
            self.agent.deregister(region)
        self.kv_regions.clear()
        for region in self.region_cache.values():
            self.agent.deregister(region)
        self.region_cache.clear()
