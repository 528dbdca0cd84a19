"""Admission by token budget: module level pools, plain functions, one worker thread."""
from __future__ import annotations

import functools
import heapq
import itertools
import logging
import queue
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

log = logging.getLogger("admission")

_TOTAL_TOKENS = 262_144
_lock = threading.Lock()
_free_tokens = _TOTAL_TOKENS
_free_seats = list(range(128))
_order = itertools.count()
_admitted: Dict[str, Tuple[int, int]] = {}
_leased: Dict[int, int] = {}
_ready: "queue.Queue[Tuple[str, int, int]]" = queue.Queue()


def take_tokens(n: int) -> int:
    """Grants n tokens or 0."""
    global _free_tokens
    with _lock:
        if n > _free_tokens:
            return 0
        _free_tokens -= n
        return n


def return_tokens(n: int) -> None:
    global _free_tokens
    with _lock:
        _free_tokens += n


def take_seat() -> Optional[int]:
    with _lock:
        return heapq.heappop(_free_seats) if _free_seats else None


def return_seat(seat: int) -> None:
    with _lock:
        heapq.heappush(_free_seats, seat)


def take_both(n: int) -> Optional[Tuple[int, int]]:
    grant = take_tokens(n)  # clean: in the returned pair, or returned when there is no seat
    if not grant:
        return None
    seat = take_seat()  # clean: in the returned pair
    if seat is None:
        return_tokens(grant)
        return None
    return grant, seat


def return_both(pair: Tuple[int, int]) -> None:
    grant, seat = pair
    return_tokens(grant)
    return_seat(seat)


def with_seat(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def inner(*args: Any, **kwargs: Any) -> Any:
        seat = take_seat()  # clean: returned in finally
        if seat is None:
            return None
        try:
            return fn(seat, *args, **kwargs)
        finally:
            return_seat(seat)
    return inner


def with_tokens(n: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def inner(*args: Any, **kwargs: Any) -> Any:
            grant = take_tokens(n)  # leak: a result of None returns before the tokens do
            if not grant:
                return None
            result = fn(*args, **kwargs)
            if result is None:
                return None
            return_tokens(grant)
            return result
        return inner
    return wrap


@with_seat
def probe_latency(seat: int, rounds: int) -> float:
    start = time.perf_counter()
    for _ in range(rounds):
        pass
    return (time.perf_counter() - start) / max(rounds, 1)


@with_tokens(512)
def dry_run(prompt: str) -> Optional[int]:
    if not prompt.strip():
        return None
    return len(prompt.split())


def admit(rid: str, prompt: int, limit: int) -> bool:
    pair = take_both(prompt + limit)  # clean: in _admitted until finish
    if pair is None:
        return False
    finish(rid)
    _admitted[rid] = pair
    return True


def finish(rid: str) -> None:
    pair = _admitted.pop(rid, None)
    if pair is not None:
        return_both(pair)


def admit_batch(rids: List[str], each: int) -> List[str]:
    taken: List[str] = []
    for rid in rids:
        pair = take_both(each)  # leak: a rid already admitted is skipped by continue with its pair in hand
        if pair is None:
            break
        if rid in _admitted:
            log.info("request %s is in already", rid)
            continue
        _admitted[rid] = pair
        taken.append(rid)
    return taken


def admit_all_or_none(rids: List[str], each: int) -> bool:
    pairs: List[Tuple[int, int]] = []
    for _ in rids:
        pair = take_both(each)  # clean: rolled back as a whole, or all in _admitted
        if pair is None:
            for done in pairs:
                return_both(done)
            return False
        pairs.append(pair)
    for rid, pair in zip(rids, pairs):
        finish(rid)
        _admitted[rid] = pair
    return True


def admit_waiting(rid: str, need: int, deadline: float) -> bool:
    while time.monotonic() < deadline:
        grant = take_tokens(need)  # leak: without a seat the loop goes round and takes the tokens anew
        if not grant:
            time.sleep(0.002)
            continue
        seat = take_seat()  # clean: in _admitted until finish
        if seat is None:
            time.sleep(0.002)
            continue
        finish(rid)
        _admitted[rid] = (grant, seat)
        return True
    return False


def admit_patient(rid: str, need: int, deadline: float) -> bool:
    grant = 0
    while not grant and time.monotonic() < deadline:
        grant = take_tokens(need)  # clean: near miss, the loop ends with the first grant; kept or returned
        if not grant:
            time.sleep(0.002)
    if not grant:
        return False
    seat = take_seat()  # clean: in _admitted until finish
    if seat is None:
        return_tokens(grant)
        return False
    finish(rid)
    _admitted[rid] = (grant, seat)
    return True


def extend(rid: str, more: int) -> bool:
    """Grows the grant of an admitted request."""
    extra = take_tokens(more)  # clean: near miss, added to the grant that finish returns, or returned
    if not extra:
        return False
    pair = _admitted.get(rid)
    if pair is None:
        return_tokens(extra)
        return False
    _admitted[rid] = (pair[0] + extra, pair[1])
    return True


def move_seat(rid: str) -> Optional[int]:
    pair = _admitted.get(rid)
    if pair is None:
        return None
    seat = take_seat()  # leak: return None when it is higher than the present one
    if seat is None or seat > pair[1]:
        return None
    _admitted[rid] = (pair[0], seat)
    return_seat(pair[1])
    return seat


def schedule(rid: str, need: int) -> bool:
    pair = take_both(need)  # clean: near miss, the worker returns what it takes from the queue
    if pair is None:
        return False
    _ready.put((rid,) + pair)
    return True


def worker(stop: threading.Event, serve: Callable[[str, int], None]) -> None:
    while True:
        try:
            rid, grant, seat = _ready.get(timeout=0.1)
        except queue.Empty:
            if stop.is_set():
                return
            continue
        serve(rid, seat)
        return_tokens(grant)
        return_seat(seat)


def lease_tokens(n: int) -> int:
    """A numbered lease over tokens, or -1; end_lease ends it."""
    grant = take_tokens(n)  # clean: in _leased until end_lease
    if not grant:
        return -1
    number = next(_order)
    _leased[number] = grant
    return number


def end_lease(number: int) -> None:
    grant = _leased.pop(number, 0)
    if grant:
        return_tokens(grant)


def largest_grant(start: int) -> int:
    size = start
    number = lease_tokens(size)  # leak: when it is granted at once the return does not end it
    while number < 0 and size > 1:
        size //= 2
        number = lease_tokens(size)  # leak: the lease found by halving is never ended
    return size if number >= 0 else 0
