"""Activation checkpoint pool for the nightly fine-tunes.

Layer inputs are parked in pooled buffers during forward and fetched in backward. The autograd
plumbing is in the trainer; this module only knows buffers and layer indices.
"""
from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple


@dataclass
class Buf:
    idx: int
    data: Any = None
    meta: Dict[str, Any] = field(default_factory=dict)


class ActivationPool:
    def __init__(self, n: int) -> None:
        self._idle: List[Buf] = [Buf(i) for i in range(n)]
        self.total = n

    def borrow(self) -> Buf:
        if not self._idle:
            raise MemoryError("activation pool empty")
        return self._idle.pop()

    def borrow_or_none(self) -> Optional[Buf]:
        if not self._idle:
            return None
        return self.borrow()  # clean: wrapper, handed on

    def give_back(self, buf: Buf) -> None:
        buf.data = None
        buf.meta.clear()
        self._idle.append(buf)

    def idle(self) -> int:
        return len(self._idle)

    @contextlib.contextmanager
    def scoped(self) -> Iterator[Buf]:
        buf = self.borrow()  # clean: finally
        try:
            yield buf
        finally:
            self.give_back(buf)

    @contextlib.contextmanager
    def scoped_pair(self) -> Iterator[Optional[Tuple[Buf, Buf]]]:
        a = self.borrow_or_none()  # leak: if b is None the pair is not yielded and a is not given back
        b = self.borrow_or_none()  # clean: given back in finally, None whenever a is
        if a is None or b is None:
            yield None
            return
        try:
            yield a, b
        finally:
            self.give_back(a)
            self.give_back(b)


Layer = Callable[[Any], Any]


class CheckpointedStack:
    def __init__(self, layers: List[Layer], pool: ActivationPool, every: int = 2) -> None:
        self.layers = layers
        self.pool = pool
        self.every = every
        self._saved: Dict[int, Buf] = {}
        self._casts: Dict[int, Buf] = {}

    def forward(self, x: Any) -> Any:
        self.reset()
        for i, layer in enumerate(self.layers):
            if i % self.every == 0:
                buf = self.pool.borrow()  # clean: kept by layer index, backward or reset give it back
                buf.data = x
                self._saved[i] = buf
            x = layer(x)
        return x

    def backward(self, grad: Any) -> Any:
        for i in reversed(range(len(self.layers))):
            buf = self._saved.pop(i, None)
            if buf is None:
                continue
            grad = grad + (buf.data or 0)
            self.pool.give_back(buf)
        return grad

    def reset(self) -> None:
        for table in (self._saved, self._casts):
            while table:
                _, buf = table.popitem()
                self.pool.give_back(buf)

    def recompute(self, upto: int) -> Any:
        """Replay from the nearest checkpoint into a scratch buffer."""
        scratch = self.pool.borrow()  # leak: no checkpoint below returns without giving it back
        base = max((i for i in self._saved if i <= upto), default=None)
        if base is None:
            return None
        scratch.data = self._saved[base].data
        for layer in self.layers[base:upto]:
            scratch.data = layer(scratch.data)
        out = scratch.data
        self.pool.give_back(scratch)
        return out

    def replay_safe(self, upto: int) -> Any:
        with self.pool.scoped() as scratch:  # clean: with
            base = max((i for i in self._saved if i <= upto), default=None)
            if base is None:
                return None
            scratch.data = self._saved[base].data
            for layer in self.layers[base:upto]:
                scratch.data = layer(scratch.data)
            return scratch.data

    def park_cast(self, i: int, x: Any) -> None:
        """Park the low precision copy of a layer input; again after each change of the loss scale."""
        buf = self.pool.borrow()  # leak: a second copy for the layer takes the place of the parked one
        buf.data = x
        self._casts[i] = buf

    def park_outliers(self, acts: Iterable[Tuple[int, float]]) -> List[int]:
        parked: List[int] = []
        for i, value in acts:
            buf = self.pool.borrow_or_none()  # clean: near miss, each continue has given back or has None
            if buf is None:
                continue
            if i in self._saved:
                self.pool.give_back(buf)
                continue
            buf.data = value
            self._saved[i] = buf
            parked.append(i)
        return parked


class OffloadHooks:
    """pack/unpack pair for saved_tensors_hooks."""

    def __init__(self, pool: ActivationPool, threshold: int) -> None:
        self.pool = pool
        self.threshold = threshold

    def pack(self, t: Any) -> Any:
        if len(t) < self.threshold:
            return t
        buf = self.pool.borrow()  # clean: near miss, autograd keeps the tuple until unpack
        buf.data = list(t)
        return ("pooled", buf)

    def unpack(self, packed: Any) -> Any:
        if isinstance(packed, tuple) and packed[0] == "pooled":
            _, buf = packed
            data = buf.data
            self.pool.give_back(buf)
            return data
        return packed


class StepRecorder:
    """Context object around a micro step."""

    def __init__(self, pool: ActivationPool, enabled: bool = True) -> None:
        self.pool = pool
        self.enabled = enabled
        self.buf: Optional[Buf] = None
        self.log: List[Any] = []

    def __enter__(self) -> "StepRecorder":
        if self.enabled:
            self.buf = self.pool.borrow()  # leak: __exit__ returns early after an overflow and skips give_back
        return self

    def __exit__(self, et, ev, tb) -> bool:
        if et is not None and issubclass(et, OverflowError):
            self.log.append("overflow")
            return True
        if self.buf is not None:
            self.log.append(self.buf.data)
            self.pool.give_back(self.buf)
            self.buf = None
        return False


class GradTap:
    def __init__(self, pool: ActivationPool) -> None:
        self.pool = pool
        self._stack: List[Buf] = []

    def __enter__(self) -> "GradTap":
        self._stack.append(self.pool.borrow())  # clean: near miss, __exit__ gives back before it looks at the exception
        return self

    def __exit__(self, et, ev, tb) -> bool:
        self.pool.give_back(self._stack.pop())
        if et is None:
            return False
        return issubclass(et, OverflowError)


def chunks(pool: ActivationPool, xs: List[Any], size: int) -> Iterator[Buf]:
    """Yields filled buffers; the consumer gives each back."""
    for s in range(0, len(xs), size):
        buf = pool.borrow()  # clean: yielded to the consumer
        buf.data = xs[s:s + size]
        yield buf


def total_norm(pool: ActivationPool, xs: List[float]) -> float:
    acc = 0.0
    for buf in chunks(pool, xs, 4):  # clean: each buffer given back in the body
        acc += sum(v * v for v in buf.data)
        pool.give_back(buf)
    return acc ** 0.5


def first_nonfinite(pool: ActivationPool, xs: List[float]) -> Optional[int]:
    for n, buf in enumerate(chunks(pool, xs, 4)):  # leak: the chunk with the find is not given back before return
        bad = [i for i, v in enumerate(buf.data) if v != v]
        if bad:
            return n * 4 + bad[0]
        pool.give_back(buf)
    return None
