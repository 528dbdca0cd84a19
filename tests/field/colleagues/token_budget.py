"""Token budget for rollout admission; functional style, grants are plain ints."""
from __future__ import annotations

import asyncio
import functools
import threading
from collections import deque
from typing import Any, Awaitable, Callable, Iterable, NamedTuple

class Budget(NamedTuple):
    take: Callable[[int], bool]
    put: Callable[[int], None]
    left: Callable[[], int]

def make_budget(total: int) -> Budget:
    """Closures over one counter."""
    left = total
    mu = threading.Lock()

    def take(n: int) -> bool:
        nonlocal left
        with mu:
            if n > left:
                return False
            left -= n
            return True

    def put(n: int) -> None:
        nonlocal left
        with mu:
            left += n

    return Budget(take, put, lambda: left)

class Request(NamedTuple):
    rid: int
    prompt: list[int]
    max_new: int

def cost(r: Request) -> int:
    return len(r.prompt) + r.max_new

def capped(outer: Budget, total: int) -> Budget:
    """A sub-budget that draws on an outer one."""
    inner = make_budget(total)

    def take(n: int) -> bool:
        if not inner.take(n):  # clean: near miss, put back when the outer refuses
            return False
        if not outer.take(n):  # clean: near miss, on success the caller puts both
            inner.put(n)
            return False
        return True

    def put(n: int) -> None:
        inner.put(n)
        outer.put(n)

    return Budget(take, put, inner.left)

def capped_by_two(a: Budget, b: Budget) -> Budget:
    def take(n: int) -> bool:
        if not a.take(n):  # leak: tokens of a stay taken when b refuses
            return False
        return b.take(n)  # clean: True hands both grants to the caller
    def put(n: int) -> None:
        a.put(n)
        b.put(n)

    return Budget(take, put, lambda: min(a.left(), b.left()))

def admit(b: Budget, waiting: deque[Request], running: dict[int, Request]) -> int:
    n = 0
    while waiting and b.take(cost(waiting[0])):  # clean: near miss, running keeps it until retire()
        r = waiting.popleft()
        running[r.rid] = r
        n += 1
    return n

def admit_generating(b: Budget, waiting: deque[Request], running: dict[int, Request]) -> int:
    n = 0
    while waiting:
        r = waiting.popleft()
        if not b.take(cost(r)):  # leak: a request with nothing to generate keeps its tokens
            waiting.appendleft(r)
            break
        if r.max_new == 0:
            continue
        running[r.rid] = r
        n += 1
    return n

def retire(b: Budget, running: dict[int, Request], rid: int) -> None:
    r = running.pop(rid, None)
    if r is not None:
        b.put(cost(r))

def with_tokens(b: Budget, n: int):
    """Decorator: run only when n tokens are to be had."""
    def deco(fn: Callable[..., Any]):
        @functools.wraps(fn)
        def inner(*a, **kw):
            if not b.take(n):  # clean: finally puts them back
                return None
            try:
                return fn(*a, **kw)
            finally:
                b.put(n)

        return inner

    return deco

def score(b: Budget, r: Request, judge: Callable[[Request], float]) -> float | None:
    if not b.take(cost(r)):  # leak: the handled ValueError returns before the put
        return None
    try:
        s = judge(r)
    except ValueError:
        return None
    b.put(cost(r))
    return s

def best_of(b: Budget, r: Request, n: int, judge: Callable[[Request], float]) -> list[float]:
    """As many samples as the budget bears."""
    got = 0
    for _ in range(n):
        if not b.take(cost(r)):  # clean: near miss, got counts the grants, one put for all
            break
        got += 1
    out = [judge(r) for _ in range(got)]
    b.put(got * cost(r))
    return out

def reserve_batch(b: Budget, rs: Iterable[Request]) -> list[Request] | None:
    """All or nothing; the caller retires each."""
    took = []
    for r in rs:
        if b.take(cost(r)):  # leak: refusal rolls back prompts only, not max_new
            took.append(r)
            continue
        b.put(sum(len(t.prompt) for t in took))
        return None
    return took

async def gated(sem: asyncio.Semaphore, make: Callable[[], Awaitable[Any]]) -> Any:
    await sem.acquire()  # clean: finally releases
    try:
        return await make()
    finally:
        sem.release()

async def first_good(sem: asyncio.Semaphore, makes: list[Callable[[], Awaitable[Any]]]) -> Any:
    for make in makes:
        await sem.acquire()  # leak: a good result returns with the permit held
        res = await make()
        if res is not None:
            return res
        sem.release()
    return None
