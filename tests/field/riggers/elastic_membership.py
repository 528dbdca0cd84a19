"""Membership of an elastic job: ranks are seats of a coordinator, stores are guarded by named locks.

A seat is held by an agent until it leaves; a named lock is held under a fencing token. The coordinator runs
in the launcher of node 0, the agents talk to it through the objects below (the transport is left out).
"""
from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Callable, Optional


@dataclass
class Seat:
    rank: int
    host: str
    epoch: int
    beat: float = 0.0


class SeatMap:
    def __init__(self, world: int):
        self.vacant = list(range(world - 1, -1, -1))
        self.taken: dict[int, Seat] = {}
        self.epoch = 0
        self._mu = threading.Lock()

    def sit(self, host: str) -> Optional[Seat]:
        with self._mu:
            if not self.vacant:
                return None
            seat = Seat(self.vacant.pop(), host, self.epoch, time.monotonic())
            self.taken[seat.rank] = seat
            return seat

    def stand(self, seat: Seat) -> None:
        with self._mu:
            if self.taken.pop(seat.rank, None) is not None:
                self.vacant.append(seat.rank)

    def expire(self, older_than: float) -> list[Seat]:
        """Vacates the seats without a heartbeat and returns them for the log."""
        with self._mu:
            dead = [s for s in self.taken.values() if s.beat < older_than]
            for s in dead:
                del self.taken[s.rank]
                self.vacant.append(s.rank)
            return dead


class NamedLocks:
    def __init__(self) -> None:
        self._owner: dict[str, int] = {}
        self._next = itertools.count(1)
        self._cond = threading.Condition()

    def lock(self, name: str, timeout: Optional[float] = None) -> int:
        """A fencing token, 0 when the time is over."""
        with self._cond:
            if not self._cond.wait_for(lambda: name not in self._owner, timeout):
                return 0
            token = next(self._next)
            self._owner[name] = token
            return token

    def unlock(self, name: str, token: int) -> bool:
        with self._cond:
            if self._owner.get(name) != token:
                return False
            del self._owner[name]
            self._cond.notify_all()
            return True


class Held:
    """with Held(locks, name): ..."""

    def __init__(self, locks: NamedLocks, name: str):
        self.locks = locks
        self.name = name
        self.token = 0

    def __enter__(self) -> int:
        self.token = self.locks.lock(self.name)  # clean: __exit__ unlocks it
        return self.token

    def __exit__(self, *exc) -> None:
        self.locks.unlock(self.name, self.token)


@dataclass
class Agent:
    host: str
    seats: list[Seat] = field(default_factory=list)
    standby: Optional[Seat] = None
    store: dict[str, str] = field(default_factory=dict)


class Launcher:
    def __init__(self, seats: SeatMap, locks: NamedLocks):
        self.seats = seats
        self.locks = locks
        self.agents: OrderedDict[str, Agent] = OrderedDict()
        self.exits: list[Callable[[], None]] = []

    # -- joining and leaving -------------------------------------------------------------------------------
    def join(self, host: str, local_world: int) -> Optional[Agent]:
        if host in self.agents:
            return None
        agent = Agent(host)
        for _ in range(local_world):
            seat = self.seats.sit(host)  # clean: near miss, stood up on refusal, later by leave
            if seat is None:
                for s in agent.seats:
                    self.seats.stand(s)
                return None
            agent.seats.append(seat)
        self.agents[host] = agent
        return agent

    def join_spare(self, host: str) -> Agent:
        agent = self.agents.setdefault(host, Agent(host))
        if agent.standby is None:
            agent.standby = self.seats.sit(host)  # leak: leave gives up seats, not standby
        return agent

    def leave(self, host: str) -> None:
        agent = self.agents.pop(host, None)
        if agent is None:
            return
        for s in agent.seats:
            self.seats.stand(s)

    def heartbeat(self, host: str) -> None:
        now = time.monotonic()
        for s in self.agents[host].seats:
            s.beat = now

    # -- store ---------------------------------------------------------------------------------------------
    def put(self, host: str, key: str, value: str) -> bool:
        token = self.locks.lock(key, timeout=1.0)  # leak: an unknown host returns False under the lock
        if not token:
            return False
        agent = self.agents.get(host)
        if agent is None:
            return False
        agent.store[key] = value
        self.locks.unlock(key, token)
        return True

    def get(self, host: str, key: str) -> Optional[str]:
        with Held(self.locks, key):  # clean: __exit__ unlocks on both returns
            agent = self.agents.get(host)
            if agent is None:
                return None
            return agent.store.get(key)

    def lock_until_exit(self, key: str) -> None:
        token = self.locks.lock(key)  # clean: near miss, the exit hook unlocks it
        self.exits.append(lambda: self.locks.unlock(key, token))

    def count_until_exit(self, key: str, log: Callable[[str], None]) -> None:
        token = self.locks.lock(key)  # leak: the exit hook only writes the token to the log
        self.exits.append(lambda: log(f"{key} was held under {token}"))

    def shutdown(self) -> None:
        for host in list(self.agents):
            self.leave(host)
        while self.exits:
            self.exits.pop()()

    # -- rendezvous ----------------------------------------------------------------------------------------
    def rendezvous(self, hosts: list[str], local_world: int, least: int) -> list[Agent]:
        """Joins as many hosts as possible; under `least` all of them leave again."""
        joined = []
        for h in hosts:
            agent = self.join(h, local_world)  # clean: near miss, kept in agents or made to leave
            if agent is not None:
                joined.append(agent)
        if len(joined) < least:
            for a in joined:
                self.leave(a.host)
            return []
        return joined


def two_phase(locks: NamedLocks, src: str, dst: str, move: Callable[[], bool]) -> bool:
    lo, hi = sorted((src, dst))
    t1 = locks.lock(lo)  # clean: unlocked on both ways
    t2 = locks.lock(hi, timeout=2.0)  # leak: a move that reports False leaves the upper lock held
    if not t2:
        locks.unlock(lo, t1)
        return False
    if not move():
        locks.unlock(lo, t1)
        return False
    locks.unlock(hi, t2)
    locks.unlock(lo, t1)
    return True


def elect(locks: NamedLocks, name: str, rounds: int, me: str, votes: dict[str, int]) -> Optional[int]:
    """The token of the leader's lock, or None for a follower."""
    for _ in range(rounds):
        token = locks.lock(name, timeout=0.5)  # clean: near miss, a lost vote unlocks, a won one is handed on
        if not token:
            continue
        if votes.get(me, 0) > len(votes) // 2:
            return token
        locks.unlock(name, token)
    return None


def lead_once(locks: NamedLocks, me: str, votes: dict[str, int], duty: Callable[[], None]) -> bool:
    token = elect(locks, "leader", 3, me, votes)  # clean: the leader unlocks after its duty
    if token is None:
        return False
    duty()
    return locks.unlock("leader", token)


def lead_quietly(locks: NamedLocks, me: str, votes: dict[str, int], members: list[str]) -> str:
    token = elect(locks, "leader", 3, me, votes)  # leak: with members it returns without unlock
    if token is None:
        return "follower"
    if members:
        return f"{me}:{token}"
    locks.unlock("leader", token)
    return "alone"
