"""Elastic rendezvous: rank slots, round locks, and health leases of worker nodes."""
from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field
from typing import Callable, Dict, Iterable, List, Optional, Set

log = logging.getLogger("rendezvous")


@dataclass(frozen=True)
class RankSlot:
    rank: int
    node: str
    generation: int


class RankTable:
    """Hands out ranks in [0, max_world)."""

    def __init__(self, max_world: int):
        self._free: List[int] = list(range(max_world))
        self._by_rank: Dict[int, RankSlot] = {}
        self._generation = 0
        self._mu = threading.Lock()

    def assign(self, node: str) -> Optional[RankSlot]:
        with self._mu:
            if not self._free:
                return None
            rank = self._free.pop(0)
            slot = RankSlot(rank, node, self._generation)
            self._by_rank[rank] = slot
            return slot

    def withdraw(self, slot: RankSlot) -> None:
        with self._mu:
            del self._by_rank[slot.rank]
            self._free.append(slot.rank)
            self._free.sort()

    def bump(self) -> int:
        with self._mu:
            self._generation += 1
            return self._generation

    def compact(self, limit: int) -> int:
        """Pull the free ranks below the limit to the front."""
        with self._mu:
            kept = []
            while self._free:
                rank = self._free.pop()  # leak: a rank at or above the limit is taken out and not kept
                if rank >= limit:
                    continue
                kept.append(rank)
            self._free = sorted(kept)
            return len(self._free)

    def rotate(self) -> None:
        with self._mu:
            if len(self._free) > 1:
                rank = self._free.pop(0)  # clean: near miss, put in again at the other end
                self._free.append(rank)


class RoundLock:
    """File lock around one rendezvous round."""

    def __init__(self, path: str):
        self.path = path
        self._fd: Optional[int] = None

    def lock(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                self._fd = os.open(self.path, os.O_CREAT | os.O_EXCL)  # clean: closed by unlock
                return True
            except FileExistsError:
                time.sleep(0.02)
        return False

    def unlock(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            os.unlink(self.path)
            self._fd = None


class HealthBoard:
    """Counts keep-alives per node: a node with a positive count is not evicted."""

    def __init__(self) -> None:
        self._counts: Dict[str, int] = {}
        self._mu = threading.Lock()

    def hold(self, node: str) -> int:
        with self._mu:
            self._counts[node] = self._counts.get(node, 0) + 1
            return self._counts[node]

    def let_go(self, node: str) -> None:
        with self._mu:
            self._counts[node] -= 1
            if self._counts[node] == 0:
                del self._counts[node]

    def evictable(self, nodes: Iterable[str]) -> List[str]:
        with self._mu:
            return [n for n in nodes if n not in self._counts]


@dataclass
class Member:
    node: str
    slot: Optional[RankSlot] = None
    held: bool = False
    joined: float = field(default_factory=time.monotonic)


class Rendezvous:
    def __init__(self, table: RankTable, board: HealthBoard, lock_path: str, min_world: int):
        self.table = table
        self.board = board
        self.min_world = min_world
        self.lock_path = lock_path
        self.round_lock = RoundLock(lock_path)
        self.members: Dict[str, Member] = {}
        self.standby: Dict[str, RankSlot] = {}
        self._listeners: List[Callable[[Member], None]] = []

    def join(self, node: str, *, watched: bool) -> Optional[Member]:
        if node in self.members:
            return self.members[node]
        slot = self.table.assign(node)  # clean: near miss, kept in the member, withdrawn by leave
        if slot is None:
            return None
        member = Member(node, slot)
        if watched:
            self.board.hold(node)  # clean: near miss, leave lets go under the flag set here
            member.held = True
        self.members[node] = member
        for listener in self._listeners:
            listener(member)
        return member

    def leave(self, node: str) -> None:
        member = self.members.pop(node, None)
        if member is None:
            return
        if member.held:
            self.board.let_go(node)
        self.table.withdraw(member.slot)

    def enlist_standby(self, node: str) -> bool:
        slot = self.table.assign(node)  # leak: dismiss_standby pops the slot and drops it
        if slot is None:
            return False
        if node in self.standby:
            self.table.withdraw(slot)
            return True
        self.standby[node] = slot
        return True

    def dismiss_standby(self, node: str) -> bool:
        slot = self.standby.pop(node, None)
        if slot is None:
            return False
        log.info("standby %s (rank %d) dismissed", node, slot.rank)
        return True

    def promote(self, node: str) -> Optional[Member]:
        slot = self.standby.pop(node, None)
        if slot is None:
            return None
        self.leave(node)
        member = self.members[node] = Member(node, slot)
        return member

    def begin_round(self, timeout: float) -> int:
        lock = RoundLock(self.lock_path)
        if not lock.lock(timeout):  # leak: too few members returns with the file locked
            return -1
        if len(self.members) < self.min_world:
            log.info("%d members, %d needed", len(self.members), self.min_world)
            return -1
        generation = self.table.bump()
        lock.unlock()
        return generation

    def with_round(self, timeout: float, body: Callable[[], int]) -> int:
        if not self.round_lock.lock(timeout):  # clean: unlocked in finally
            return -1
        try:
            if len(self.members) < self.min_world:
                return -1
            return body()
        finally:
            self.round_lock.unlock()

    def freeze(self) -> bool:
        """Hold the round lock until thaw."""
        return self.round_lock.lock(1.0)  # clean: near miss, thaw unlocks

    def thaw(self) -> None:
        self.round_lock.unlock()

    def admit(self, nodes: Iterable[str]) -> int:
        admitted = 0
        for node in nodes:
            slot = self.table.assign(node)  # leak: a node that is a member already has its new slot dropped
            if slot is None:
                break
            if node in self.members:
                continue
            self.members[node] = Member(node, slot)
            admitted += 1
        return admitted

    def probe_all(self, ping: Callable[[str], bool]) -> Set[str]:
        dead: Set[str] = set()
        for node in list(self.members):
            self.board.hold(node)  # leak: let go only for the nodes that answer
            if ping(node):
                self.board.let_go(node)
            else:
                dead.add(node)
        for node in dead:
            self.leave(node)
        return dead

    def evict(self, ping: Callable[[str], bool]) -> List[str]:
        silent = []
        nodes = self.board.evictable(self.members)
        for node in nodes:
            self.board.hold(node)  # clean: near miss, let go in the second loop over the same list
        for node in nodes:
            if not ping(node):
                silent.append(node)
            self.board.let_go(node)
        for node in silent:
            self.leave(node)
        return silent

    def close(self) -> None:
        for node in list(self.members):
            self.leave(node)
        self.thaw()


class Reservation:
    """Several ranks for one node, taken and returned as one."""

    def __init__(self, table: RankTable, node: str, count: int):
        self.table = table
        self.slots: List[RankSlot] = []
        for _ in range(count):
            slot = table.assign(node)  # clean: near miss, release withdraws all of them
            if slot is None:
                self.release()
                break
            self.slots.append(slot)

    def shrink(self, count: int) -> None:
        while len(self.slots) > count:
            self.table.withdraw(self.slots.pop())

    def release(self) -> None:
        for slot in self.slots:
            self.table.withdraw(slot)
        self.slots = []
