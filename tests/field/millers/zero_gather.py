"""ZeRO-3 style parameter gathering: partitions are assembled into pooled full-size buffers on demand."""
from __future__ import annotations

import logging
from collections import deque
from contextlib import contextmanager
from typing import Deque, Dict, Iterator, List, Optional, Sequence, Tuple

log = logging.getLogger(__name__)


class GatherError(RuntimeError):
    pass


class FullParam:
    """A gathered parameter, valid until ``relinquish``."""

    def __init__(self, size: int) -> None:
        self.values = [0.0] * size
        self.owner: Optional[str] = None


class GatherPool:
    def __init__(self, buffers: int, size: int) -> None:
        self._free: Deque[FullParam] = deque(FullParam(size) for _ in range(buffers))

    def obtain(self, owner: str) -> FullParam:
        if not self._free:
            raise GatherError(f"no gather buffer for {owner}")
        buf = self._free.popleft()
        buf.owner = owner
        return buf

    def relinquish(self, buf: FullParam) -> None:
        buf.owner = None
        self._free.append(buf)

    def spare(self) -> int:
        return len(self._free)


class Partition:
    def __init__(self, name: str, shards: Sequence[Sequence[float]]) -> None:
        self.name = name
        self.shards = shards


class GatherBase:
    def __init__(self, pool: GatherPool) -> None:
        self.pool = pool

    def _assemble(self, part: Partition) -> FullParam:
        buf = self.pool.obtain(part.name)  # clean: handed on to the caller
        flat = [v for s in part.shards for v in s]
        buf.values[: len(flat)] = flat
        return buf

    def gather(self, part: Partition) -> FullParam:
        return self._assemble(part)  # clean: wrapper hands it on

    def evict(self, buf: FullParam) -> None:
        self.pool.relinquish(buf)


class TraceMixin:
    """Records the order in which parameters were gathered."""

    trace: List[str]

    def gather(self, part: Partition) -> FullParam:
        self.trace.append(part.name)
        return super().gather(part)  # clean: wrapper of a wrapper hands it on


class PersistMixin:
    """Small parameters stay gathered between uses, until ``reset``."""

    threshold = 4

    def __init__(self, pool: GatherPool) -> None:
        super().__init__(pool)
        self._persistent: Dict[Optional[str], FullParam] = {}

    def gather(self, part: Partition) -> FullParam:
        kept = self._persistent.get(part.name)
        if kept is not None:
            return kept
        buf = super().gather(part)  # clean: near miss, kept when small and evicted by reset, else the caller's
        if sum(map(len, part.shards)) <= self.threshold:
            self._persistent[part.name] = buf
        return buf

    def evict(self, buf: FullParam) -> None:
        if self._persistent.get(buf.owner) is buf:
            return
        super().evict(buf)

    def reset(self) -> None:
        while self._persistent:
            super().evict(self._persistent.popitem()[1])


class EagerGatherer(TraceMixin, GatherBase):
    def __init__(self, pool: GatherPool) -> None:
        super().__init__(pool)
        self.trace: List[str] = []

    def norm(self, part: Partition) -> float:
        buf = self.gather(part)  # clean: evicted after the sum
        total = sum(v * v for v in buf.values)
        self.evict(buf)
        return total

    def peak(self, part: Partition) -> float:
        return max(self.gather(part).values)  # leak: the wrapper's buffer is read and dropped

    def sync(self, part: Partition, updates: Dict[str, Sequence[float]]) -> bool:
        buf = self.gather(part)  # leak: a partition without update returns without evict
        new = updates.get(part.name)
        if new is None:
            return False
        buf.values[: len(new)] = new
        self.evict(buf)
        return True


class PersistentGatherer(PersistMixin, EagerGatherer):
    threshold = 2


class StepGatherer(GatherBase):
    """Gathers per module; ``pre_forward`` and ``post_forward`` come in pairs."""

    def __init__(self, pool: GatherPool, offload: bool) -> None:
        super().__init__(pool)
        self.offload = offload
        self._live: Dict[str, FullParam] = {}
        self._mirror: Optional[FullParam] = None

    def pre_forward(self, part: Partition) -> FullParam:
        buf = self._live.get(part.name)
        if buf is None:
            buf = self._live[part.name] = self.gather(part)  # clean: kept in _live, evicted by post_forward
        if self.offload and self._mirror is None:
            self._mirror = self.pool.obtain("mirror")  # clean: near miss, post_forward checks the same flag and relinquishes it
            self._mirror.values[:] = buf.values
        return buf

    def post_forward(self, part: Partition) -> None:
        self.evict(self._live.pop(part.name))
        if self.offload and self._mirror is not None:
            self.pool.relinquish(self._mirror)
            self._mirror = None

    def run(self, parts: Sequence[Partition], x: float) -> float:
        for p in parts:
            x += sum(self.pre_forward(p).values) * x  # clean: post_forward evicts it
            self.post_forward(p)
        return x


class GatheredParameters:
    """``with GatheredParameters(g, parts) as bufs``; with ``modifier_rank`` None the partitions are read only."""

    def __init__(self, gatherer: GatherBase, parts: Sequence[Partition], modifier_rank: Optional[int] = None) -> None:
        self.gatherer = gatherer
        self.parts = parts
        self.modifier_rank = modifier_rank
        self._bufs: List[FullParam] = []

    def __enter__(self) -> List[FullParam]:
        for p in self.parts:
            self._bufs.append(self.gatherer.gather(p))  # leak: __exit__ returns early when the partitions are read only
        return self._bufs

    def __exit__(self, exc_type, exc, tb) -> None:
        if self.modifier_rank is None:
            return
        for p, buf in zip(self.parts, self._bufs):
            width = len(p.shards[self.modifier_rank])
            p.shards[self.modifier_rank][:] = buf.values[:width]
        while self._bufs:
            self.gatherer.evict(self._bufs.pop())


@contextmanager
def summoned(gatherer: GatherBase, part: Partition) -> Iterator[FullParam]:
    buf = gatherer.gather(part)  # clean: finally
    try:
        yield buf
    finally:
        gatherer.evict(buf)


class LazyHandle:
    """Gathered at first access; used by the prefetch queue."""

    def __init__(self, gatherer: GatherBase, part: Partition) -> None:
        self._gatherer = gatherer
        self._part = part
        self._buf: Optional[FullParam] = None

    def get(self) -> FullParam:
        if self._buf is None:
            self._buf = self._gatherer.gather(self._part)  # clean: near miss, kept until drop
        return self._buf

    def drop(self) -> None:
        if self._buf is not None:
            self._gatherer.evict(self._buf)
            self._buf = None


def prefetch_window(gatherer: GatherBase, parts: Sequence[Partition], depth: int) -> Iterator[Tuple[str, float]]:
    window: Deque[LazyHandle] = deque()
    try:
        for p in parts:
            h = LazyHandle(gatherer, p)
            window.append(h)
            if len(window) > depth:
                window.popleft().drop()
            yield p.name, h.get().values[0]  # clean: the handle keeps it and is dropped from the window
    finally:
        for h in window:
            h.drop()


def gather_pairwise(gatherer: GatherBase, a: Partition, b: Partition) -> Optional[float]:
    left = gatherer.gather(a)  # leak: GatherError of the second gather is survived without evicting left
    try:
        right = gatherer.gather(b)  # clean: evicted at the end
    except GatherError:
        log.warning("cannot hold %s and %s together", a.name, b.name)
        return None
    dot = sum(x * y for x, y in zip(left.values, right.values))
    gatherer.evict(right)
    gatherer.evict(left)
    return dot


def main() -> None:
    pool = GatherPool(3, 4)
    a, b = Partition("a", [[1.0], [2.0]]), Partition("b", [[3.0], [4.0]])
    eager = EagerGatherer(pool)
    eager.norm(a)
    StepGatherer(pool, True).run([a, b], 1.0)
    with summoned(eager, a) as buf:  # clean: context manager
        assert buf.values[1] == 2.0
    assert gather_pairwise(eager, a, b) == 11.0
    assert dict(prefetch_window(eager, [a, b, a, b], 1)) == {"a": 1.0, "b": 3.0}
    keep = PersistentGatherer(pool)
    keep.norm(a), keep.norm(a)
    assert pool.spare() == 2
    keep.reset()
    assert pool.spare() == 3
    eager.peak(a)
    print(pool.spare())


if __name__ == "__main__":
    main()
