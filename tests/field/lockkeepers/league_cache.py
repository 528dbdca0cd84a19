"""Self-play league: opponents' policies are loaded into a cache and stay pinned while they play."""
from __future__ import annotations

import functools
import logging
import random
import threading
from collections import OrderedDict
from typing import Callable, Dict, Iterable, List, Optional

log = logging.getLogger("league")

Play = Callable[["Opponent", "Opponent"], float]


class Opponent:
    def __init__(self, name: str, elo: float) -> None:
        self.name = name
        self.elo = elo
        self.pins = 0
        self.retired = False

    def update(self, other_elo: float, result: float) -> None:
        expected = 1.0 / (1.0 + 10 ** ((other_elo - self.elo) / 400))
        self.elo += 16 * (result - expected)


class OpponentCache:
    """enter_ring() loads and pins an opponent, leave_ring() unpins. Only unpinned ones are evicted."""

    def __init__(self, loader: Callable[[str], Opponent], capacity: int) -> None:
        self._loader = loader
        self._capacity = capacity
        self._entries: "OrderedDict[str, Opponent]" = OrderedDict()
        self._lock = threading.RLock()

    def enter_ring(self, name: str) -> Opponent:
        with self._lock:
            opp = self._entries.get(name)
            if opp is None:
                opp = self._loader(name)
                self._entries[name] = opp
                self._shrink()
            opp.pins += 1
            self._entries.move_to_end(name)
            return opp

    def enter_if_cached(self, name: str) -> Optional[Opponent]:
        with self._lock:
            opp = self._entries.get(name)
            if opp is None:
                return None
            opp.pins += 1
            return opp

    def leave_ring(self, opp: Opponent) -> None:
        with self._lock:
            opp.pins -= 1
            self._shrink()

    def _shrink(self) -> None:
        for name in list(self._entries):
            if len(self._entries) <= self._capacity:
                return
            if self._entries[name].pins == 0:
                del self._entries[name]


class InRing:
    def __init__(self, cache: OpponentCache, name: str) -> None:
        self.cache = cache
        self.name = name

    def __enter__(self) -> Opponent:
        self.opp = self.cache.enter_ring(self.name)  # clean: __exit__ leaves the ring
        return self.opp

    def __exit__(self, *exc) -> None:
        self.cache.leave_ring(self.opp)


def rated_match(cache: OpponentCache, left: str, right: str, play: Play) -> float:
    with InRing(cache, left) as a, InRing(cache, right) as b:  # clean: both leave at the end of the with
        result = play(a, b)
        before = a.elo
        a.update(b.elo, result)
        b.update(before, 1.0 - result)
        return result


def friendly_match(cache: OpponentCache, left: str, right: str, play: Play) -> Optional[float]:
    a = cache.enter_ring(left)  # leak: a retired opponent returns None with both pinned
    b = cache.enter_ring(right)  # leak: a retired opponent returns None with both pinned
    if a.retired or b.retired:
        return None
    result = play(a, b)
    cache.leave_ring(a)
    cache.leave_ring(b)
    return result


def knockout(cache: OpponentCache, names: List[str], play: Play) -> Optional[str]:
    """Pairs of the field play until one is left; losers leave the ring at once."""
    alive = [cache.enter_ring(name) for name in names]  # clean: near miss, each loser and the winner leave
    while len(alive) > 1:
        a, b = alive.pop(), alive.pop()
        winner, loser = (a, b) if play(a, b) >= 0.5 else (b, a)
        cache.leave_ring(loser)
        alive.insert(0, winner)
    if not alive:
        return None
    champion = alive.pop()
    cache.leave_ring(champion)
    return champion.name


def swiss(cache: OpponentCache, names: List[str], play: Play, rounds: int) -> Dict[str, float]:
    field = [cache.enter_ring(name) for name in names]  # leak: with an odd field the last one is sliced off
    score = {opp.name: 0.0 for opp in field}
    if len(field) % 2:
        score[field[-1].name] += 1.0
        field = field[:-1]
    for _ in range(rounds):
        random.shuffle(field)
        for a, b in zip(field[::2], field[1::2]):
            result = play(a, b)
            score[a.name] += result
            score[b.name] += 1.0 - result
    for opp in field:
        cache.leave_ring(opp)
    return score


def strongest(cache: OpponentCache, names: Iterable[str]) -> Optional[Opponent]:
    """Pinned; the caller makes it leave."""
    best: Optional[Opponent] = None
    for name in names:
        opp = cache.enter_ring(name)  # leak: the weaker one of each comparison stays pinned
        if best is None or opp.elo > best.elo:
            best = opp
    return best


def weakest(cache: OpponentCache, names: Iterable[str]) -> Optional[Opponent]:
    """Pinned; the caller makes it leave."""
    worst: Optional[Opponent] = None
    for name in names:
        opp = cache.enter_ring(name)  # clean: near miss, the one that is not kept leaves
        if worst is None:
            worst = opp
            continue
        drop = opp
        if opp.elo < worst.elo:
            drop, worst = worst, opp
        cache.leave_ring(drop)
    return worst


def retire_weakest(cache: OpponentCache, names: List[str]) -> Optional[str]:
    opp = weakest(cache, names)  # clean: leaves after the mark, None for no names
    if opp is None:
        return None
    opp.retired = True
    cache.leave_ring(opp)
    return opp.name


def with_opponent(cache: OpponentCache):
    """Decorator: the function gets a pinned opponent in place of a name."""

    def wrap(func):
        @functools.wraps(func)
        def inner(name: str, *args):
            opp = cache.enter_ring(name)  # clean: leaves in finally
            try:
                return func(opp, *args)
            finally:
                cache.leave_ring(opp)

        return inner

    return wrap


def with_rated_opponent(cache: OpponentCache, floor: float):
    """Decorator: as with_opponent, and skips opponents under the floor."""

    def wrap(func):
        @functools.wraps(func)
        def inner(name: str, *args):
            opp = cache.enter_ring(name)  # leak: a skipped opponent is not made to leave
            if opp.elo < floor:
                log.debug("%s is under %.0f", name, floor)
                return None
            try:
                return func(opp, *args)
            finally:
                cache.leave_ring(opp)

        return inner

    return wrap


class Arena:
    """Opponents sit in numbered corners until they are rung out."""

    def __init__(self, cache: OpponentCache, corners: int) -> None:
        self.cache = cache
        self.corners: List[Optional[Opponent]] = [None] * corners

    def seat(self, corner: int, name: str) -> None:
        previous = self.corners[corner]
        self.corners[corner] = self.cache.enter_ring(name)  # clean: near miss, the previous one leaves below
        if previous is not None:
            self.cache.leave_ring(previous)

    def fight(self, i: int, j: int, play: Play) -> Optional[float]:
        a, b = self.corners[i], self.corners[j]
        if a is None or b is None:
            return None
        return play(a, b)

    def ring_out(self) -> None:
        for i, opp in enumerate(self.corners):
            if opp is not None:
                self.cache.leave_ring(opp)
                self.corners[i] = None


class PracticeHall:
    """Sparring partners by the trainee's name."""

    def __init__(self, cache: OpponentCache) -> None:
        self.cache = cache
        self.partners: Dict[str, List[Opponent]] = {}

    def invite(self, trainee: str, name: str) -> int:
        opp = self.cache.enter_ring(name)  # leak: close() makes only the first partner of a trainee leave
        self.partners.setdefault(trainee, []).append(opp)
        return len(self.partners[trainee])

    def close(self, trainee: str) -> None:
        partners = self.partners.pop(trainee, [])
        if partners:
            self.cache.leave_ring(partners[0])
