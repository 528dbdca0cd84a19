"""Activation pools between pipeline stages."""
from __future__ import annotations

from collections import deque
from typing import Callable, Deque, Dict, Generic, Iterable, Iterator, List, Optional, Protocol, Tuple, TypeVar


class Sized(Protocol):
    @property
    def numel(self) -> int: ...


B = TypeVar("B", bound=Sized)


class Activation:
    def __init__(self, numel: int) -> None:
        self._numel = numel
        self.values: List[float] = [0.0] * numel

    @property
    def numel(self) -> int:
        return self._numel

    def clone(self) -> "Activation":
        other = Activation(self._numel)
        other.values[:] = self.values
        return other


class Lender(Protocol[B]):
    def borrow(self) -> B: ...
    def give_back(self, item: B) -> None: ...


class RingPool(Generic[B]):
    def __init__(self, make: Callable[[], B], depth: int) -> None:
        self._make = make
        self._idle: Deque[B] = deque(make() for _ in range(depth))
        self.lent = 0

    def borrow(self) -> B:
        self.lent += 1
        return self._idle.popleft() if self._idle else self._make()

    def give_back(self, item: B) -> None:
        self.lent -= 1
        self._idle.append(item)

    def borrow_pair(self) -> Tuple[B, B]:
        first = self.borrow()  # clean: returned in the pair
        second = self.borrow()  # clean: returned in the pair
        return first, second


class Link(Protocol):
    def recv_into(self, act: Activation) -> bool: ...
    def send(self, act: Activation) -> None: ...


class Stage:
    """One pipeline stage. Inputs are stashed for the backward pass."""

    def __init__(self, pool: Lender[Activation], link: Link, fn: Callable[[float], float], keep: bool) -> None:
        self.pool = pool
        self.link = link
        self.fn = fn
        self.keep = keep
        self._stash: Dict[int, Activation] = {}

    def _apply(self, src: Activation) -> Activation:
        out = self.pool.borrow()  # clean: returned
        for i, v in enumerate(src.values):
            out.values[i] = self.fn(v)
        return out

    def forward(self, mb: int) -> bool:
        x = self.pool.borrow()  # clean: given back, or kept in the stash until backward
        if not self.link.recv_into(x):
            self.pool.give_back(x)
            return False
        y = self._apply(x)  # clean: sent and given back
        self.link.send(y)
        self.pool.give_back(y)
        if self.keep:
            self._stash[mb] = x
        else:
            self.pool.give_back(x)
        return True

    def forward_eval(self, mb: int) -> Optional[List[float]]:
        x = self.pool.borrow()  # leak: an empty link returns None with the buffer borrowed
        if not self.link.recv_into(x):
            return None
        y = self._apply(x)  # leak: the values are copied out and the pooled output dropped
        self.pool.give_back(x)
        return list(y.values)

    def backward(self, mb: int, grad: Activation) -> None:
        x = self._stash.pop(mb)
        for i, g in enumerate(grad.values):
            x.values[i] *= g
        self.link.send(x)
        self.pool.give_back(x)

    def recompute(self, mb: int) -> Activation:
        """Detached output of a stashed microbatch."""
        out = self._apply(self._stash[mb])  # clean: near miss, the clone leaves and the pooled one goes back
        kept = out.clone()
        self.pool.give_back(out)
        return kept

    def chain(self, x: Activation, depth: int) -> Activation:
        """Apply the stage `depth` times; the result belongs to the caller."""
        cur = self._apply(x)  # leak: rebound by each further step of the loop
        for _ in range(depth - 1):
            cur = self._apply(cur)  # leak: rebound on the next turn
        return cur

    def chain_inplace(self, x: Activation, depth: int) -> Activation:
        cur = self._apply(x)  # clean: near miss, the loop gives back the old one before it rebinds
        for _ in range(depth - 1):
            nxt = self._apply(cur)  # clean: becomes the current one
            self.pool.give_back(cur)
            cur = nxt
        return cur


class MicrobatchFeeder(Generic[B]):
    def __init__(self, pool: Lender[B]) -> None:
        self.pool = pool
        self._ready: Deque[B] = deque()

    def stream(self, fills: Iterable[Callable[[B], bool]]) -> Iterator[B]:
        """Yields a filled buffer, which goes back once the consumer asks for the next."""
        for fill in fills:
            item = self.pool.borrow()  # leak: a fill that declines skips the give_back
            if not fill(item):
                continue
            yield item
            self.pool.give_back(item)

    def stream_safe(self, fills: Iterable[Callable[[B], bool]]) -> Iterator[B]:
        for fill in fills:
            item = self.pool.borrow()  # clean: near miss, the `continue` passes through the finally
            try:
                if not fill(item):
                    continue
                yield item
            finally:
                self.pool.give_back(item)

    def preload(self, fills: Iterable[Callable[[B], bool]]) -> int:
        for fill in fills:
            item = self.pool.borrow()  # clean: queued, or given back when the fill declines
            if fill(item):
                self._ready.append(item)
            else:
                self.pool.give_back(item)
        return len(self._ready)

    def consume(self, use: Callable[[B], None]) -> None:
        while self._ready:
            item = self._ready.popleft()
            try:
                use(item)
            finally:
                self.pool.give_back(item)


def exchange(pool: RingPool[Activation], left: Link, right: Link) -> bool:
    a, b = pool.borrow_pair()  # leak: a silent right neighbour returns the first buffer only
    if not left.recv_into(a):
        pool.give_back(a)
        pool.give_back(b)
        return False
    if not right.recv_into(b):
        pool.give_back(a)
        return False
    left.send(b)
    right.send(a)
    pool.give_back(b)
    pool.give_back(a)
    return True


def activation_pool(numel: int, depth: int) -> RingPool[Activation]:
    return RingPool(lambda: Activation(numel), depth)
