"""Rendezvous membership for elastic jobs, on asyncio.

Every node that takes part in a round holds a Lease from the LeaseBoard.  A lease
counts against the seats of the job until it is revoked.
"""
import asyncio
import enum
import itertools
import logging
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Awaitable, Callable, Dict, List, Optional

log = logging.getLogger("rdzv")


class RoundClosed(Exception):
    pass


class NodeRejected(Exception):
    def __init__(self, node: str, why: str):
        super().__init__(f"{node}: {why}")
        self.node = node


class Phase(enum.Enum):
    OPEN = "open"
    SEALED = "sealed"


@dataclass
class Lease:
    id: int
    node: str
    expires: float
    meta: dict = field(default_factory=dict)

    def stale(self) -> bool:
        return time.monotonic() > self.expires


class LeaseBoard:
    """Seats of one job.  grant() waits for a seat, revoke() frees it."""

    def __init__(self, seats: int, ttl: float = 15.0):
        self._seats: asyncio.Queue = asyncio.Queue()
        for n in range(seats):
            self._seats.put_nowait(n)
        self._seat_of: Dict[int, int] = {}
        self._ids = itertools.count(1)
        self.ttl = ttl
        self.phase = Phase.OPEN

    async def grant(self, node: str) -> Lease:
        seat = await self._seats.get()  # leak: RoundClosed is raised after the seat was taken and the seat is not put back
        if self.phase is not Phase.OPEN:
            raise RoundClosed(node)
        lease = Lease(next(self._ids), node, time.monotonic() + self.ttl)
        self._seat_of[lease.id] = seat
        return lease

    def grant_nowait(self, node: str) -> Optional[Lease]:
        if self.phase is not Phase.OPEN:
            return None
        try:
            seat = self._seats.get_nowait()  # clean: on QueueEmpty nothing was taken, else revoke() puts it back
        except asyncio.QueueEmpty:
            return None
        lease = Lease(next(self._ids), node, time.monotonic() + self.ttl)
        self._seat_of[lease.id] = seat
        return lease

    def revoke(self, lease: Lease) -> None:
        seat = self._seat_of.pop(lease.id, None)
        if seat is not None:
            self._seats.put_nowait(seat)

    @asynccontextmanager
    async def hold(self, node: str):
        lease = await self.grant(node)  # clean: revoked in finally
        try:
            yield lease
        finally:
            self.revoke(lease)


class Membership:
    """Leases of the nodes that joined the current round."""

    def __init__(self, board: LeaseBoard, min_nodes: int, max_nodes: int):
        self.board = board
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.members: Dict[str, Lease] = {}

    async def join(self, node: str, meta: dict) -> int:
        lease = await self.board.grant(node)  # leak: a node that joins again overwrites the entry of its earlier lease
        lease.meta.update(meta)
        self.members[node] = lease
        return lease.id

    async def rejoin(self, node: str, meta: dict) -> int:
        old = self.members.pop(node, None)
        if old is not None:
            self.board.revoke(old)
        lease = await self.board.grant(node)  # clean: near miss, the previous lease of the node was revoked above
        lease.meta.update(meta)
        previous = self.members.get(node)
        if previous is not None:
            self.board.revoke(previous)
        self.members[node] = lease
        return lease.id

    def leave(self, node: str) -> None:
        lease = self.members.pop(node, None)
        if lease is not None:
            self.board.revoke(lease)

    async def wait_quorum(self, timeout: float) -> bool:
        limit = time.monotonic() + timeout
        while len(self.members) < self.min_nodes:
            if time.monotonic() > limit:
                return False
            await asyncio.sleep(0.2)
        return True

    def seal(self) -> Dict[str, int]:
        self.board.phase = Phase.SEALED
        return {node: rank for rank, node in enumerate(sorted(self.members))}

    def clear(self) -> None:
        for node in list(self.members):
            self.leave(node)
        self.board.phase = Phase.OPEN


Probe = Callable[[str], Awaitable[dict]]


def vet(node: str, facts: dict) -> None:
    if facts.get("gpus", 0) == 0:
        raise NodeRejected(node, "no accelerator")
    if facts.get("driver", "") < "535":
        raise NodeRejected(node, "driver too old")


async def admit(board: LeaseBoard, node: str, probe: Probe) -> Optional[Lease]:
    """Lease a seat for a node and check its hardware; None when it is unfit."""
    lease = board.grant_nowait(node)  # leak: NodeRejected from vet() is caught and the lease is not revoked
    if lease is None:
        return None
    try:
        facts = await probe(node)
        vet(node, facts)
        lease.meta["facts"] = facts
    except NodeRejected as exc:
        log.warning("rejected: %s", exc)
        return None
    return lease


async def admit_strict(board: LeaseBoard, node: str, probe: Probe) -> Lease:
    lease = await board.grant(node)  # clean: near miss, revoked for any exception and else returned to the caller
    try:
        facts = await probe(node)
        vet(node, facts)
    except BaseException:
        board.revoke(lease)
        raise
    lease.meta["facts"] = facts
    return lease


async def admit_all(membership: Membership, nodes: List[str], probe: Probe) -> List[str]:
    admitted = []
    for node in nodes:
        if len(membership.members) >= membership.max_nodes:
            break
        if node in membership.members:
            continue
        lease = await admit(membership.board, node, probe)  # clean: goes to members or is revoked when the node slipped in meanwhile
        if lease is None:
            continue
        if node in membership.members:
            membership.board.revoke(lease)
            continue
        membership.members[node] = lease
        admitted.append(node)
    return admitted


class StandbyPool:
    """A few warm nodes that hold a seat before they are needed."""

    def __init__(self, board: LeaseBoard, probe: Probe, target: int):
        self.board = board
        self.probe = probe
        self.target = target
        self._warm: List[Lease] = []
        self._filler: Optional[asyncio.Task] = None

    def start(self, candidates: List[str]) -> None:
        self._filler = asyncio.create_task(self._fill(candidates))

    async def _fill(self, candidates: List[str]) -> None:
        for node in candidates:
            if len(self._warm) >= self.target:
                return
            try:
                lease = await admit_strict(self.board, node, self.probe)  # leak: stop() cancels the filler during the sleep and this lease is in no list yet
            except (NodeRejected, RoundClosed) as exc:
                log.info("standby: %s", exc)
                continue
            await asyncio.sleep(1.0)
            self._warm.append(lease)

    def promote(self, membership: Membership) -> Optional[str]:
        while self._warm:
            lease = self._warm.pop()  # clean: near miss, a stale one is revoked and a live one goes to the members
            if lease.stale() or lease.node in membership.members:
                self.board.revoke(lease)
                continue
            membership.members[lease.node] = lease
            return lease.node
        return None

    async def stop(self) -> None:
        if self._filler is not None:
            self._filler.cancel()
            try:
                await self._filler
            except asyncio.CancelledError:
                pass
        for lease in self._warm:
            self.board.revoke(lease)
        self._warm.clear()


async def run_round(membership: Membership, standby: StandbyPool, work: Callable[[Dict[str, int]], Awaitable[None]]) -> bool:
    try:
        if not await membership.wait_quorum(60.0):
            return False
        while len(membership.members) < membership.max_nodes and standby.promote(membership):
            pass
        observer = membership.board.grant_nowait("observer")  # leak: revoked only after work() succeeded, the ConnectionError handler returns without it
        try:
            await work(membership.seal())
        except ConnectionError as exc:
            log.error("round failed: %s", exc)
            return False
        if observer is not None:
            membership.board.revoke(observer)
        return True
    finally:
        membership.clear()
        await standby.stop()
