from __future__ import annotations

import itertools
import logging
import queue
import threading
from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Optional, Protocol, Sequence, Tuple

logger = logging.getLogger(__name__)


class Wire(Protocol):
    def write(self, peer: str, src: int, dst: int, length: int) -> int: ...

    def poll(self, op: int) -> str: ...


@dataclass(frozen=True)
class Region:
    key: int
    addr: int
    length: int


class Registrar:
    """Memory regions known to the network card."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._keys = itertools.count(1)
        self._live: Dict[int, Region] = {}

    def register(self, addr: int, length: int) -> Optional[Region]:
        if len(self._live) >= self.limit:
            return None
        region = Region(next(self._keys), addr, length)
        self._live[region.key] = region
        return region

    def register_all(self, parts: Sequence[Tuple[int, int]]) -> Optional[List[Region]]:
        regions: List[Region] = []
        for addr, length in parts:
            region = self.register(addr, length)  # leak: the regions before the one that fails are not deregistered
            if region is None:
                return None
            regions.append(region)
        return regions

    def deregister(self, region: Region) -> None:
        self._live.pop(region.key, None)


class LandingZone:
    """Pages on the decode side that wait for remote KV."""

    def __init__(self, pages: int) -> None:
        self._pages = list(range(pages))
        self._lock = threading.Lock()

    def allot(self, n: int) -> Optional[List[int]]:
        with self._lock:
            if len(self._pages) < n:
                return None
            got, self._pages = self._pages[:n], self._pages[n:]
            return got

    def free(self, pages: Iterable[int]) -> None:
        with self._lock:
            self._pages.extend(pages)


@dataclass
class Transfer:
    request: str
    pages: List[int]
    region: Region
    ops: List[int] = field(default_factory=list)
    failed: bool = False


class KVReceiver:
    def __init__(self, wire: Wire, registrar: Registrar, zone: LandingZone, page_bytes: int, base: int) -> None:
        self.wire = wire
        self.registrar = registrar
        self.zone = zone
        self.page_bytes = page_bytes
        self.base = base
        self.transfers: Dict[str, Transfer] = {}
        self.arrived: "queue.Queue[Transfer]" = queue.Queue()
        self.scratch: List[int] = []
        self.meta: Optional[Region] = None

    def expect(self, request: str, tokens: int, per_page: int) -> bool:
        need = -(-tokens // per_page)
        pages = self.zone.allot(need)  # leak: a refused registration returns without freeing the pages
        if pages is None:
            return False
        region = self.registrar.register(self.base + pages[0] * self.page_bytes, need * self.page_bytes)  # clean: kept in the transfer, deregistered when it settles
        if region is None:
            logger.warning("no registration left for %s", request)
            return False
        self.transfers[request] = Transfer(request, pages, region)
        return True

    def expect_prefix(self, request: str, need: int, cached: List[int]) -> int:
        if len(cached) >= need:
            return 0
        pages = self.zone.allot(need - len(cached))  # clean: near miss, freed where the registration is refused, otherwise in the transfer
        if pages is None:
            return -1
        region = self.registrar.register(self.base, len(pages) * self.page_bytes)  # clean: kept in the transfer
        if region is None:
            self.zone.free(pages)
            return -1
        self.transfers[request] = Transfer(request, pages, region)
        return len(pages)

    def _settle(self, transfer: Transfer) -> None:
        self.registrar.deregister(transfer.region)
        self.zone.free(transfer.pages)

    def poll(self) -> int:
        moved = 0
        for request in list(self.transfers):
            transfer = self.transfers[request]
            states = [self.wire.poll(op) for op in transfer.ops]
            if "error" in states:
                transfer.failed = True
            elif "busy" in states:
                continue
            self.arrived.put(self.transfers.pop(request))
            moved += 1
        return moved

    def take_arrived(self) -> Optional[Transfer]:
        try:
            transfer = self.arrived.get_nowait()  # clean: near miss, a failed one settles here, others go to the caller
        except queue.Empty:
            return None
        if transfer.failed:
            self._settle(transfer)
            return None
        return transfer

    def ingest(self, copy_in, limit: int) -> int:
        done = 0
        while done < limit:
            transfer = self.take_arrived()  # leak: one the copy refuses breaks out of the loop unsettled
            if transfer is None:
                break
            if not copy_in(transfer.request, transfer.pages):
                break
            self._settle(transfer)
            done += 1
        return done

    def ingest_or_requeue(self, copy_in) -> int:
        done = 0
        for _ in range(self.arrived.qsize()):
            transfer = self.take_arrived()  # clean: near miss, one the copy refuses is queued again
            if transfer is None:
                continue
            if not copy_in(transfer.request, transfer.pages):
                self.arrived.put(transfer)
                continue
            self._settle(transfer)
            done += 1
        return done

    def extend(self, request: str, extra: int) -> bool:
        more = self.zone.allot(extra)  # clean: near miss, freed for an unknown request, otherwise added to its pages
        if more is None:
            return False
        transfer = self.transfers.get(request)
        if transfer is None:
            self.zone.free(more)
            return False
        transfer.pages.extend(more)
        return True

    def shrink(self, request: str, keep: int) -> bool:
        transfer = self.transfers.get(request)
        if transfer is None or len(transfer.pages) <= keep:
            return False
        tail, transfer.pages = transfer.pages[keep:], transfer.pages[:keep]
        self.zone.free(tail)
        return True

    def send(self, peer: str, request: str, parts: List[Tuple[int, int]]) -> bool:
        regions = self.registrar.register_all(parts)  # clean: near miss, deregistered one by one whatever the writes say
        if regions is None:
            return False
        ok = True
        for region in regions:
            op = self.wire.write(peer, region.addr, self.base, region.length)
            while (state := self.wire.poll(op)) == "busy":
                pass
            ok = ok and state == "done"
        for region in regions:
            self.registrar.deregister(region)
        return ok

    def send_first(self, peer: str, parts: List[Tuple[int, int]]) -> bool:
        regions = self.registrar.register_all(parts[:2])  # leak: only the first of the regions is deregistered
        if not regions:
            return False
        op = self.wire.write(peer, regions[0].addr, self.base, regions[0].length)
        while self.wire.poll(op) == "busy":
            pass
        self.registrar.deregister(regions[0])
        return True

    def refresh_meta(self, addr: int, length: int) -> bool:
        fresh = self.registrar.register(addr, length)  # clean: near miss, takes the place of the former one, which is deregistered
        if fresh is None:
            return False
        if self.meta is not None:
            self.registrar.deregister(self.meta)
        self.meta = fresh
        return True

    def grow_scratch(self, n: int) -> bool:
        pages = self.zone.allot(n)  # leak: the scratch pages held so far are overwritten
        if pages is None:
            return False
        self.scratch = pages
        return True

    def cancel(self, request: str) -> None:
        transfer = self.transfers.pop(request, None)
        if transfer is not None:
            self._settle(transfer)

    def close(self) -> None:
        for request in list(self.transfers):
            self.cancel(request)
        while not self.arrived.empty():
            self._settle(self.arrived.get_nowait())
        self.zone.free(self.scratch)
        self.scratch = []
        if self.meta is not None:
            self.registrar.deregister(self.meta)
            self.meta = None
