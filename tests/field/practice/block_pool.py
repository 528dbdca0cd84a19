"""Memory pools of the inference runtime.

    BuddyPool      power-of-two arena
    TieredPool     fast pool in front of a slow one
    ElasticPool    grows and shrinks, evicts least recently used entries
"""
import bisect
import collections
import dataclasses
import threading
import typing

import torch


class PoolExhausted(RuntimeError):
    pass


class BuddyPool:
    def __init__(self, order: int):
        self.order = order
        self.lists: typing.List[typing.List[int]] = [[] for _ in range(order + 1)]
        self.lists[order].append(0)
        self.sizes: typing.Dict[int, int] = {}

    def alloc(self, order: int) -> int:
        for k in range(order, self.order + 1):
            if self.lists[k]:
                off = self.lists[k].pop()
                while k > order:
                    k -= 1
                    self.lists[k].append(off + (1 << k))
                self.sizes[off] = order
                return off
        raise PoolExhausted(order)

    def dealloc(self, off: int) -> None:
        k = self.sizes.pop(off)
        while k < self.order:
            mate = off ^ (1 << k)
            if mate not in self.lists[k]:
                break
            self.lists[k].remove(mate)
            off = min(off, mate)
            k += 1
        self.lists[k].append(off)

    def alloc_aligned(self, order: int, align: int) -> typing.Optional[int]:
        off = self.alloc(order)  # leak: an offset off the alignment is dropped
        if off % align:
            return None
        return off

    def alloc_below(self, order: int, limit: int) -> typing.Optional[int]:
        off = self.alloc(order)  # clean: near miss, handed back to itself when it is too high
        if off >= limit:
            self.dealloc(off)
            return None
        return off


class FixedPool:
    def __init__(self, n: int):
        self.avail = collections.deque(range(n))

    def acquire(self) -> typing.Optional[int]:
        return self.avail.popleft() if self.avail else None

    def release(self, i: int) -> None:
        self.avail.append(i)


@dataclasses.dataclass
class Tiered:
    fast: typing.Optional[int]
    slow: typing.Optional[int]


class TieredPool:
    def __init__(self, fast: FixedPool, slow: FixedPool, mirror: bool = False):
        self.fast, self.slow, self.mirror = fast, slow, mirror

    def acquire(self) -> typing.Optional[Tiered]:
        f = self.fast.acquire()  # leak: with mirror on and the slow tier empty it is lost
        if f is not None and not self.mirror:
            return Tiered(f, None)
        s = self.slow.acquire()  # clean: part of what is returned, nothing taken in the None return
        if s is None:
            return None
        return Tiered(f, s)

    def acquire_both(self) -> typing.Optional[Tiered]:
        f = self.fast.acquire()  # clean: near miss, rolled back without the second
        if f is None:
            return None
        s = self.slow.acquire()  # clean: in the result
        if s is None:
            self.fast.release(f)
            return None
        return Tiered(f, s)

    def release(self, t: Tiered) -> None:
        if t.fast is not None:
            self.fast.release(t.fast)
        if t.slow is not None:
            self.slow.release(t.slow)


class ElasticPool:
    CHUNK = 32

    def __init__(self, width: int, max_chunks: int = 8):
        self.width = width
        self.max_chunks = max_chunks
        self.chunks: typing.List[torch.Tensor] = []
        self.spare: typing.List[torch.Tensor] = []
        self.lru: "collections.OrderedDict[str, torch.Tensor]" = collections.OrderedDict()
        self.lock = threading.Lock()

    def _grow(self) -> bool:
        if len(self.chunks) >= self.max_chunks:
            return False
        chunk = torch.empty(self.CHUNK, self.width)
        self.chunks.append(chunk)
        self.spare.extend(chunk.unbind(0))
        return True

    def get_row(self) -> torch.Tensor:
        with self.lock:
            if not self.spare and not self._grow():
                _, row = self.lru.popitem(last=False)  # clean: near miss, the evicted row is what the caller gets
                return row
            return self.spare.pop()

    def put_row(self, row: torch.Tensor) -> None:
        self.spare.append(row)

    def remember(self, key: str, row: torch.Tensor) -> None:
        stale = self.lru.pop(key, None)
        if stale is not None:
            self.put_row(stale)
        self.lru[key] = row

    def evict(self, n: int) -> int:
        done = 0
        while self.lru and done < n:
            key, row = self.lru.popitem(last=False)  # leak: rows of pinned keys are popped and not put anywhere
            if key.startswith("pinned:"):
                continue
            self.spare.append(row)
            done += 1
        return done

    def evict_keep_pinned(self, n: int) -> int:
        back = []
        done = 0
        while self.lru and done < n:
            key, row = self.lru.popitem(last=False)  # clean: near miss, pinned rows are put into the table again
            if key.startswith("pinned:"):
                back.append((key, row))
                continue
            self.spare.append(row)
            done += 1
        self.lru.update(back)
        return done

    def get_zeroed(self, limit: float) -> typing.Optional[torch.Tensor]:
        row = self.get_row()  # leak: a row with large entries is refused and forgotten
        if row.abs().max() > limit:
            return None
        return row.zero_()

    def get_rows(self, n: int) -> typing.List[torch.Tensor]:
        return [self.get_row() for _ in range(n)]  # clean: the list goes to the caller


def stack_rows(pool: ElasticPool, xs: typing.Sequence[torch.Tensor]) -> torch.Tensor:
    rows = pool.get_rows(len(xs))  # clean: stack copies, the loop puts all back
    for r, x in zip(rows, xs):
        r.copy_(x)
    out = torch.stack(rows)
    for r in rows:
        pool.put_row(r)
    return out


def max_rows(pool: ElasticPool, xs: typing.Sequence[torch.Tensor]) -> torch.Tensor:
    rows = pool.get_rows(len(xs))  # leak: only rows that beat the running maximum are put back
    best = torch.full((pool.width,), float("-inf"))
    for r, x in zip(rows, xs):
        r.copy_(x)
        if bool((r > best).any()):
            best = torch.maximum(best, r)
            pool.put_row(r)
    return best


def fit_order(pool: BuddyPool, sizes: typing.List[int]) -> typing.List[int]:
    offs: typing.List[int] = []
    for s in sizes:
        try:
            bisect.insort(offs, pool.alloc(s))  # leak: when the pool runs out the offsets collected are thrown away
        except PoolExhausted:
            return []
    for o in offs:
        pool.dealloc(o)
    return offs
