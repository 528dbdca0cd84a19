"""Ships KV pages from prefill nodes to decode nodes over RDMA.

Registered regions are scarce on the card and landing pages are scarce on the decode node, so both are counted here.
"""
import enum
import itertools
import logging
import threading
import time
from collections import OrderedDict, deque
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

log = logging.getLogger("kvwire")


class WireError(Exception): ...
class RegionsExhausted(WireError): ...

State = enum.Enum("State", "OFFERED READY SENT FAILED")


class Region(NamedTuple):
    rid: int
    addr: int
    size: int
    lkey: int
    rkey: int


class RegionTable:
    """Registrations of this card."""

    def __init__(self, verbs, limit: int = 256) -> None:
        self.verbs, self.limit = verbs, limit
        self.live: Dict[int, Region] = {}
        self._ids = itertools.count()
        self._lock = threading.Lock()

    def register(self, addr: int, size: int) -> Region:
        with self._lock:
            if len(self.live) >= self.limit:
                raise RegionsExhausted(f"{self.limit} regions are registered")
            lkey, rkey = self.verbs.reg_mr(addr, size)  # clean: kept in the table of live regions, see deregister()
            region = Region(next(self._ids), addr, size, lkey, rkey)
            self.live[region.rid] = region
            return region

    def deregister(self, region: Region) -> None:
        with self._lock:
            if self.live.pop(region.rid, None) is not None:
                self.verbs.dereg_mr(region.lkey)


class RegionCache:
    """Registration is slow, so tensors that are sent again and again stay registered (least recently used out)."""

    def __init__(self, table: RegionTable, keep: int = 64) -> None:
        self.table, self.keep = table, keep
        self._lru: "OrderedDict[Tuple[int, int], Region]" = OrderedDict()

    def region_for(self, addr: int, size: int) -> Region:
        key = (addr, size)
        hit = self._lru.get(key)
        if hit is not None:
            self._lru.move_to_end(key)
            return hit
        region = self.table.register(addr, size)  # clean: stays in the cache until it is evicted or forgotten
        self._lru[key] = region
        self._trim()
        return region

    def forget(self, addr: int) -> None:
        """The allocator has freed the tensor at addr."""
        for key in [k for k in self._lru if k[0] == addr]:
            self.table.deregister(self._lru.pop(key))

    def resize(self, keep: int) -> None:
        self.keep = keep
        self._trim()

    def _trim(self) -> None:
        while len(self._lru) > self.keep:
            self.table.deregister(self._lru.popitem(last=False)[1])


class LandingZone:
    """Pages of the decode node into which remote cards write."""

    def __init__(self, base: int, page: int, count: int) -> None:
        self.base, self.page = base, page
        self._free = deque(range(count))
        self._cv = threading.Condition()

    def claim(self, n: int, timeout: float = 1.0) -> Optional[List[int]]:
        got: List[int] = []
        deadline = time.monotonic() + timeout
        with self._cv:
            while len(got) < n:
                if self._free:
                    got.append(self._free.popleft())  # leak: when the deadline passes the pages collected so far are dropped with the list
                    continue
                left = deadline - time.monotonic()
                if left <= 0 or not self._cv.wait(left):
                    return None
        return got

    def free(self, pages: List[int]) -> None:
        with self._cv:
            self._free.extend(pages)
            self._cv.notify_all()

    def address(self, page: int) -> int:
        return self.base + page * self.page


class Offer:
    """What a decode node knows of a transfer that it has agreed to."""

    def __init__(self, req_id: str, pages: List[int], zone: LandingZone) -> None:
        self.req_id, self.pages, self.zone = req_id, pages, zone
        self.state = State.OFFERED
        self.since = time.monotonic()

    def settle(self, ok: bool) -> List[int]:
        self.state = State.READY if ok else State.FAILED
        if not ok:
            self.zone.free(self.pages)
            self.pages = []
        return self.pages


class DecodeSide:
    def __init__(self, table: RegionTable, zone: LandingZone, control, attach: Callable[[str, List[int]], None]) -> None:
        self.table, self.zone, self.control, self.attach = table, zone, control, attach
        self.offers: Dict[str, Offer] = {}
        self.window = table.register(zone.base, zone.page * len(zone._free))  # clean: for the life of the node, close() deregisters it

    def on_request(self, req_id: str, npages: int) -> Optional[dict]:
        if req_id in self.offers:
            return None
        pages = self.zone.claim(npages)  # clean: near miss, the offer has them until on_done() or expire() settles it
        if pages is None:
            return None
        self.offers[req_id] = Offer(req_id, pages, self.zone)
        return {"rkey": self.window.rkey, "at": [self.zone.address(p) for p in pages]}

    def on_done(self, req_id: str, ok: bool) -> None:
        offer = self.offers.pop(req_id, None)
        pages = offer.settle(ok) if offer is not None else []
        if pages:
            self.attach(req_id, pages)

    def on_migrate(self, req_id: str, npages: int, peer: str) -> bool:
        """Another decode node hands a running request over to us."""
        pages = self.zone.claim(npages, timeout=0.0)  # leak: a peer that refuses makes this return False with the pages still claimed
        if pages is None:
            return False
        reply = self.control.call(peer, "pull", req_id, [self.zone.address(p) for p in pages])
        if not reply["ok"]:
            log.warning("%s refuses to hand over %s", peer, req_id)
            return False
        self.attach(req_id, pages)
        return True

    def expire(self, seconds: float) -> None:
        horizon = time.monotonic() - seconds
        for offer in [o for o in self.offers.values() if o.since < horizon]:
            self.offers.pop(offer.req_id).settle(False)

    def scratch(self, use: Callable[[int], None]) -> bool:
        pages = self.zone.claim(1, timeout=0.1)  # clean: near miss, None or freed in the finally
        try:
            if pages is None:
                return False
            use(self.zone.address(pages[0]))
            return True
        finally:
            if pages is not None:
                self.zone.free(pages)

    def close(self) -> None:
        for offer in list(self.offers.values()):
            offer.settle(False)
        self.offers.clear()
        self.table.deregister(self.window)


class Transfer:
    """One request on its way out; owns the temporary regions of its layers."""

    def __init__(self, table: RegionTable, req_id: str) -> None:
        self.table, self.req_id = table, req_id
        self.regions: List[Region] = []
        self.header: Optional[Region] = None
        self.state = State.OFFERED

    def add(self, addr: int, size: int) -> None:
        region = self.table.register(addr, size)  # clean: near miss, in the list that finish() walks
        self.regions.append(region)

    def set_header(self, addr: int, size: int) -> None:
        self.header = self.table.register(addr, size)  # leak: finish() walks the list of layer regions and leaves the header registered

    def finish(self, state: State) -> None:
        self.state = state
        while self.regions:
            self.table.deregister(self.regions.pop())


class PrefillSide:
    def __init__(self, table: RegionTable, cache: RegionCache, qp, control) -> None:
        self.table, self.cache = table, cache
        self.qp, self.control = qp, control
        self.moving: Dict[str, Transfer] = {}

    def begin(self, req_id: str, layers: List[Tuple[int, int]], header: Tuple[int, int]) -> Optional[Transfer]:
        if req_id in self.moving:
            return self.moving[req_id]
        transfer = Transfer(self.table, req_id)
        try:
            transfer.set_header(*header)
            for addr, size in layers:
                transfer.add(addr, size)
        except RegionsExhausted as exc:
            log.warning("%s: %s", req_id, exc)
            transfer.finish(State.FAILED)
            return None
        self.moving[req_id] = transfer
        return transfer

    def push(self, transfer: Transfer, ticket: dict) -> None:
        for region, remote in zip(transfer.regions, ticket["at"]):
            self.qp.post_write(region.addr, region.size, region.lkey, remote, ticket["rkey"])

    def on_completion(self, req_id: str, ok: bool) -> None:
        transfer = self.moving.pop(req_id, None)
        if transfer is not None:
            transfer.finish(State.SENT if ok else State.FAILED)
            self.control.cast("done", req_id, ok)

    def send_token(self, addr: int, size: int, remote: int, rkey: int) -> None:
        region = self.cache.region_for(addr, size)  # clean: near miss, the region belongs to the cache
        self.qp.post_write(addr, size, region.lkey, remote, rkey)

    def send_once(self, addr: int, size: int, remote: int, rkey: int, timeout: float = 2.0) -> None:
        region = self.table.register(addr, size)  # leak: a write that is not confirmed in time raises WireError before the region is deregistered
        self.qp.post_write(addr, size, region.lkey, remote, rkey)
        if not self.qp.wait(timeout):
            raise WireError(f"no completion in {timeout}s")
        self.table.deregister(region)

    def swap_pair(self, src: Tuple[int, int], dst: Tuple[int, int]) -> None:
        """Exchange two local ranges through the card's loopback."""
        a = self.table.register(*src)  # leak: the second registration raises RegionsExhausted while the first is held
        b = self.table.register(*dst)  # clean: deregistered in the finally
        try:
            self.qp.loopback(a.lkey, b.lkey)
        finally:
            self.table.deregister(a)
            self.table.deregister(b)
