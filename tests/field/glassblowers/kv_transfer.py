"""Prefill/decode disaggregation: moving KV pages between workers over RDMA.

The sender holds credits, work-request ids and memory registrations; the receiver
holds landing pages until the decode engine adopts them.
"""
from __future__ import annotations

import contextlib
import heapq
import logging
import time
from dataclasses import dataclass, field
from typing import Dict, Iterator, List, Optional, Tuple

logger = logging.getLogger("disagg.transfer")


class CreditPool:
    def __init__(self, per_peer: int) -> None:
        self.per_peer = per_peer
        self.out: Dict[str, int] = {}

    def spend(self, peer: str, n: int = 1) -> bool:
        used = self.out.get(peer, 0)
        if used + n > self.per_peer:
            return False
        self.out[peer] = used + n
        return True

    def earn(self, peer: str, n: int = 1) -> None:
        self.out[peer] -= n


class RegistrationCache:
    """Registered memory regions, reference counted by (addr, length)."""

    def __init__(self, nic) -> None:
        self.nic = nic
        self._regs: Dict[Tuple[int, int], List] = {}

    def map(self, addr: int, length: int):
        entry = self._regs.get((addr, length))
        if entry is None:
            entry = self._regs[(addr, length)] = [self.nic.reg_mr(addr, length), 0]  # clean: unmap() deregisters at zero references
        entry[1] += 1
        return entry[0]

    def unmap(self, mr) -> None:
        entry = self._regs[(mr.addr, mr.length)]
        entry[1] -= 1
        if entry[1] == 0:
            del self._regs[(mr.addr, mr.length)]
            self.nic.dereg_mr(mr)


class LandingZone:
    """Receiver-side pages, handed out lowest first."""

    def __init__(self, pages: int) -> None:
        self._heap = list(range(pages))

    def land(self) -> Optional[int]:
        if not self._heap:
            return None
        return heapq.heappop(self._heap)  # clean: returned to the caller

    def lift(self, page: int) -> None:
        heapq.heappush(self._heap, page)

    def land_run(self, n: int) -> Optional[List[int]]:
        """n pages with consecutive numbers."""
        run: List[int] = []
        while self._heap and len(run) < n:
            page = heapq.heappop(self._heap)  # leak: a gap restarts the run and the pages before it are lost
            if run and page != run[-1] + 1:
                run = [page]
                continue
            run.append(page)
        if len(run) < n:
            for page in run:
                heapq.heappush(self._heap, page)
            return None
        return run


@dataclass
class Transfer:
    rid: str
    peer: str
    mrs: List = field(default_factory=list)
    credits: int = 0
    state: str = "init"


class Sender:
    def __init__(self, nic, credits: CreditPool, regs: RegistrationCache) -> None:
        self.nic = nic
        self.credits = credits
        self.regs = regs
        self.inflight: Dict[str, Transfer] = {}

    def push(self, rid: str, peer: str, chunks: List[Tuple[int, int]]) -> bool:
        if not self.credits.spend(peer, len(chunks)):  # clean: kept in the transfer, settle() earns it back
            return False
        tr = Transfer(rid, peer, credits=len(chunks))
        for addr, length in chunks:
            tr.mrs.append(self.regs.map(addr, length))  # clean: near miss, settle() unmaps every region of the transfer
        self.inflight[rid] = tr
        for mr in tr.mrs:
            self.nic.post_write(peer, mr, rid)
        return True

    def on_completion(self, rid: str, status: str) -> None:
        tr = self.inflight.pop(rid, None)
        if tr is None:
            return
        tr.state = status
        self.settle(tr)

    def settle(self, tr: Transfer) -> None:
        for mr in tr.mrs:
            self.regs.unmap(mr)
        tr.mrs.clear()
        self.credits.earn(tr.peer, tr.credits)
        tr.credits = 0

    def push_header(self, rid: str, peer: str, addr: int, length: int) -> bool:
        mr = self.regs.map(addr, length)  # leak: not unmapped when the peer has no credit
        if not self.credits.spend(peer):  # clean: earned back after the blocking write
            return False
        self.nic.write_sync(peer, mr, rid)
        self.credits.earn(peer)
        self.regs.unmap(mr)
        return True

    def push_with_retry(self, rid: str, peer: str, addr: int, length: int, tries: int = 4) -> bool:
        mr = self.regs.map(addr, length)  # clean: unmapped in finally
        try:
            for attempt in range(tries):
                if not self.credits.spend(peer):  # leak: a rejected write spends another credit on the next attempt
                    time.sleep(0.001 * 2 ** attempt)
                    continue
                if self.nic.write_sync(peer, mr, rid) == "ok":
                    self.credits.earn(peer)
                    return True
            return False
        finally:
            self.regs.unmap(mr)

    def push_layerwise(self, rid: str, peer: str, layers: Iterator[Tuple[int, int]]) -> int:
        """Send each layer as soon as its prefill is done; count of layers sent."""
        sent = 0
        for addr, length in layers:
            if length == 0:
                continue
            with self.region(addr, length) as mr:  # clean: with statement
                if not self.credits.spend(peer):  # clean: near miss, earned on both branches below
                    break
                if self.nic.write_sync(peer, mr, rid) != "ok":
                    self.credits.earn(peer)
                    break
                self.credits.earn(peer)
                sent += 1
        return sent

    @contextlib.contextmanager
    def region(self, addr: int, length: int):
        mr = self.regs.map(addr, length)  # clean: unmapped in finally
        try:
            yield mr
        finally:
            self.regs.unmap(mr)

    def abort_peer(self, peer: str) -> None:
        for rid in [r for r, t in self.inflight.items() if t.peer == peer]:
            self.settle(self.inflight.pop(rid))


class Receiver:
    def __init__(self, zone: LandingZone, engine) -> None:
        self.zone = zone
        self.engine = engine
        self.waiting: Dict[str, List[int]] = {}

    def expect(self, rid: str, n: int) -> Optional[List[int]]:
        pages: List[int] = []
        for _ in range(n):
            page = self.zone.land()  # clean: near miss, lifted on shortage and else in self.waiting
            if page is None:
                for p in pages:
                    self.zone.lift(p)
                return None
            pages.append(page)
        self.waiting[rid] = pages
        return pages

    def expect_contiguous(self, rid: str, n: int) -> Optional[int]:
        run = self.zone.land_run(n)  # leak: a request the engine already cancelled keeps its run
        if run is None:
            return None
        if self.engine.is_cancelled(rid):
            logger.info("%s cancelled before transfer", rid)
            return None
        self.waiting[rid] = run
        return run[0]

    def adopt(self, rid: str) -> None:
        """The engine copies the pages into its own cache."""
        pages = self.waiting.pop(rid)
        self.engine.copy_in(rid, pages)
        for p in pages:
            self.zone.lift(p)

    def fail(self, rid: str) -> None:
        for p in self.waiting.pop(rid, []):
            self.zone.lift(p)

    def bounce(self, rid: str, last: int) -> bool:
        """Take one page for the tail of a prompt, handing it on if the engine wants it."""
        page = self.zone.land()  # leak: a refused tail is only logged, the page is not lifted
        if page is None:
            return False
        if self.engine.wants(rid, last):
            self.engine.copy_in(rid, [page])
            self.zone.lift(page)
            return True
        logger.debug("engine refused tail %d of %s", last, rid)
        return False

    def shutdown(self) -> None:
        for rid in list(self.waiting):
            self.fail(rid)
