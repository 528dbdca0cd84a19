"""ZeRO-3 style parameter coordinator: fetch/prefetch/release with counts."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Deque, Iterator, Optional

log = logging.getLogger("zero3")


@dataclass(eq=False)
class Gathered:
    pid: int
    data: bytearray
    users: int = 0


@dataclass
class Param:
    pid: int
    shard: bytes
    persist: bool = False
    frozen: bool = False


@dataclass
class Module:
    name: str
    params: list[Param]
    children: list["Module"] = field(default_factory=list)
    held: list[Gathered] = field(default_factory=list)
    held_bwd: list[Gathered] = field(default_factory=list)


class GatherPool:
    """Reserve counts bytes; a param gathered twice shares the buffer."""

    def __init__(self, limit: int, world: int = 2) -> None:
        self.limit = limit
        self.world = world
        self.used = 0
        self.live: dict[int, Gathered] = {}

    def reserve(self, p: Param, force: bool = False) -> Optional[Gathered]:
        g = self.live.get(p.pid)
        if g is not None:
            g.users += 1
            return g
        need = len(p.shard) * self.world
        if self.used + need > self.limit and not force:
            return None
        self.used += need
        g = Gathered(p.pid, bytearray(p.shard * self.world), 1)
        self.live[p.pid] = g
        return g

    def unreserve(self, g: Gathered) -> None:
        g.users -= 1
        if g.users == 0:
            self.used -= len(g.data)
            del self.live[g.pid]


class Coordinator:
    def __init__(self, pool: GatherPool, depth: int = 2) -> None:
        self.pool = pool
        self.depth = depth
        self.ahead: Deque[Gathered] = deque()
        self.trace: list[int] = []
        self.persistent: dict[int, Gathered] = {}
        self.overlap = depth > 0

    # module hooks
    def pre_forward(self, m: Module) -> None:
        for p in m.params:
            if p.persist:
                if p.pid not in self.persistent:
                    self.persistent[p.pid] = self._must(p)  # clean: kept for the life of the run, release_persistent gives them back
                continue
            m.held.append(self._must(p))  # clean: post_forward gives back everything in held

    def post_forward(self, m: Module) -> None:
        for g in m.held:
            self.pool.unreserve(g)
        m.held.clear()

    def _must(self, p: Param) -> Gathered:
        g = self.pool.reserve(p)  # clean: returned to the caller, or the forced one is
        if g is None:
            self._evict()
            g = self.pool.reserve(p, force=True)  # clean: returned to the caller
            assert g is not None
        return g

    def _evict(self) -> None:
        while self.ahead:
            self.pool.unreserve(self.ahead.popleft())

    def release_persistent(self) -> None:
        for pid in list(self.persistent):
            self.pool.unreserve(self.persistent.pop(pid))

    def pre_backward(self, m: Module) -> None:
        m.held_bwd = [self._must(p) for p in m.params]  # leak: post_backward skips the frozen ones and then empties the list

    def post_backward(self, m: Module) -> None:
        for p, g in zip(m.params, m.held_bwd):
            if p.frozen:
                continue
            self.pool.unreserve(g)
        m.held_bwd = []

    # prefetch
    def prefetch(self, upcoming: list[Param]) -> int:
        n = 0
        for p in upcoming:
            if n >= self.depth:
                break
            g = self.pool.reserve(p)  # clean: queued in ahead, evict or take gives it back
            if g is None:
                break
            self.ahead.append(g)
            n += 1
        return n

    def take(self, p: Param) -> Gathered:
        """Hand the prefetched buffer over to the caller if it is there."""
        for i, g in enumerate(self.ahead):
            if g.pid == p.pid:
                del self.ahead[i]
                return g
        return self._must(p)  # clean: returned to the caller

    def run(self, params: list[Param]) -> int:
        total = 0
        for i, p in enumerate(params):
            g = self.take(p)  # clean: given back in the same iteration
            self.prefetch(params[i + 1:])
            total += sum(g.data)
            self.pool.unreserve(g)
        self._evict()
        return total

    def overlap_guarded(self, cur: Param, nxt: Param) -> int:
        if self.overlap:
            ahead = self.pool.reserve(nxt)  # leak: a frozen cur clears the flag which guards the release
        g = self._must(cur)  # clean: given back below
        n = sum(g.data)
        if cur.frozen:
            self.overlap = False
        self.pool.unreserve(g)
        if self.overlap and ahead is not None:
            self.pool.unreserve(ahead)
        return n

    # gathering contexts
    def gathered(self, params: list[Param]) -> "GatherCtx":
        return GatherCtx(self, params)

    def count_nonzero(self, params: list[Param]) -> int:
        with self.gathered(params) as gs:  # clean: context manager
            return sum(1 for g in gs for b in g.data if b)

    def export(self, params: list[Param]) -> Iterator[tuple[int, bytes]]:
        for p in params:
            g = self._must(p)  # clean: near miss, the copy is made and the buffer returned before the yield
            blob = bytes(g.data)
            self.pool.unreserve(g)
            yield p.pid, blob

    def export_live(self, params: list[Param]) -> Iterator[Gathered]:
        """Consumer must call pool.unreserve on each."""
        for p in params:
            yield self._must(p)  # clean: the consumer owns it

    def save(self, params: list[Param], only: Optional[set[int]] = None) -> dict[int, bytes]:
        out = {}
        for g in self.export_live(params):  # leak: filtered ones are skipped without unreserve
            if only is not None and g.pid not in only:
                continue
            out[g.pid] = bytes(g.data)
            self.pool.unreserve(g)
        return out


class GatherCtx:
    def __init__(self, co: Coordinator, params: list[Param], modify_rank: Optional[int] = None) -> None:
        self.co = co
        self.params = params
        self.modify_rank = modify_rank
        self.got: list[Gathered] = []

    def __enter__(self) -> list[Gathered]:
        for p in self.params:
            self.got.append(self.co._must(p))  # clean: near miss, both ways out of __exit__ give them back
        return self.got

    def __exit__(self, *exc: Any) -> None:
        if self.modify_rank is None:
            self._free()
            return
        for p, g in zip(self.params, self.got):
            p.shard = bytes(g.data[:len(p.shard)])
        self._free()

    def _free(self) -> None:
        while self.got:
            self.co.pool.unreserve(self.got.pop())


if __name__ == "__main__":
    pool = GatherPool(1 << 10)
    ps = [Param(i, bytes([i] * 8)) for i in range(1, 6)]
    co = Coordinator(pool)
    m = Module("m", ps)
    co.pre_forward(m); co.post_forward(m)
    print(co.run(ps), co.count_nonzero(ps), len(dict(co.export(ps))))
    print(pool.used)
