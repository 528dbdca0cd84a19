"""KV block manager for the RL rollout engine (paged, prefix shared)."""
from __future__ import annotations

import enum
import logging
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Iterable, Optional

log = logging.getLogger("rollout.kv")
BLOCK = 16


class NoBlocks(Exception):
    pass


class BlockManager:
    def __init__(self, n: int) -> None:
        self.refs = [0] * n
        self._free = deque(range(n))

    def alloc(self) -> int:
        if not self._free:
            raise NoBlocks()
        b = self._free.popleft()
        self.refs[b] = 1
        return b

    def incref(self, b: int) -> int:
        assert self.refs[b] > 0
        self.refs[b] += 1
        return b

    def decref(self, b: int) -> None:
        self.refs[b] -= 1
        if self.refs[b] == 0:
            self._free.append(b)

    def alloc_n(self, n: int) -> Optional[list[int]]:
        """n blocks or None."""
        if n > len(self._free):
            return None
        return [self.alloc() for _ in range(n)]  # clean: near miss, the count is checked first and the list goes to the caller

    def grow(self, table: list[int], n: int) -> bool:
        got: list[int] = []
        try:
            for _ in range(n):
                got.append(self.alloc())  # leak: NoBlocks half way returns False and got is forgotten
        except NoBlocks:
            return False
        table.extend(got)
        return True

    def grow_strict(self, table: list[int], n: int) -> bool:
        start = len(table)
        try:
            for _ in range(n):
                table.append(self.alloc())  # clean: near miss, the table's tail is decref'd on NoBlocks
        except NoBlocks:
            while len(table) > start:
                self.decref(table.pop())
            return False
        return True

    @property
    def n_free(self) -> int:
        return len(self._free)


class State(enum.Enum):
    WAIT = 0
    RUN = 1
    DONE = 2
    ABORT = 3


@dataclass
class Sequence:
    sid: int
    tokens: list[int]
    table: list[int] = field(default_factory=list)
    state: State = State.WAIT
    pinned: Optional[int] = None

    @property
    def need(self) -> int:
        return -(-len(self.tokens) // BLOCK)


class PrefixCache:
    """Holds one ref on every cached block."""

    def __init__(self, mgr: BlockManager, cap: int) -> None:
        self.mgr = mgr
        self.cap = cap
        self.map: "OrderedDict[tuple[int, ...], int]" = OrderedDict()
        self.tails: "OrderedDict[tuple[int, ...], int]" = OrderedDict()

    def insert_tail(self, key: tuple[int, ...], b: int) -> None:
        """Partly filled last blocks, for multi-turn rollouts."""
        self.mgr.incref(b)  # leak: an existing entry of the key is overwritten with its ref
        self.tails[key] = b
        while len(self.tails) > self.cap:
            _, old = self.tails.popitem(last=False)
            self.mgr.decref(old)

    def insert_once(self, key: tuple[int, ...], b: int) -> bool:
        if key in self.map:
            self.map.move_to_end(key)
            return False
        self.map[key] = self.mgr.incref(b)  # clean: the cache's own ref, evicted by cap or clear
        if len(self.map) > self.cap:
            _, old = self.map.popitem(last=False)
            self.mgr.decref(old)
        return True

    def match(self, tokens: list[int]) -> list[int]:
        """Shared blocks for the longest cached prefix; the caller owns one ref each."""
        out: list[int] = []
        for i in range(0, len(tokens) - BLOCK + 1, BLOCK):
            b = self.map.get(tuple(tokens[:i + BLOCK]))
            if b is None:
                break
            out.append(self.mgr.incref(b))  # clean: returned to the caller
        return out

    def clear(self) -> None:
        for table in (self.map, self.tails):
            for b in table.values():
                self.mgr.decref(b)
            table.clear()


class Engine:
    def __init__(self, mgr: BlockManager, prefix: PrefixCache) -> None:
        self.mgr = mgr
        self.prefix = prefix
        self.running: dict[int, Sequence] = {}
        self.hits = 0

    def _drop(self, seq: Sequence) -> None:
        for b in seq.table:
            self.mgr.decref(b)
        seq.table = []

    def admit(self, seq: Sequence) -> bool:
        shared = self.prefix.match(seq.tokens)  # leak: not decref'd when the fresh blocks are missing
        fresh = self.mgr.alloc_n(seq.need - len(shared))  # clean: moves into the table, finish drops it
        if fresh is None:
            return False
        seq.table = shared + fresh
        seq.state = State.RUN
        self.running[seq.sid] = seq
        return True

    def admit_or_undo(self, seq: Sequence) -> bool:
        seq.table = self.prefix.match(seq.tokens)  # clean: near miss, _drop undoes it on the failing way
        fresh = self.mgr.alloc_n(seq.need - len(seq.table))  # clean: extends the table
        if fresh is None:
            self._drop(seq)
            return False
        seq.table += fresh
        seq.state = State.RUN
        self.running[seq.sid] = seq
        return True

    def cached_len(self, tokens: list[int]) -> int:
        return BLOCK * len(self.prefix.match(tokens))  # leak: the refs of the match are only counted

    def probe(self, tokens: list[int]) -> int:
        blocks = self.prefix.match(tokens)  # clean: every ref is dropped again
        for b in blocks:
            self.mgr.decref(b)
        self.hits += bool(blocks)
        return len(blocks)

    def fork(self, parent: Sequence, sid: int, copy_last: bool) -> Optional[Sequence]:
        child = Sequence(sid, list(parent.tokens))
        for b in parent.table:
            self.mgr.incref(b)  # leak: when no block is there for the copied tail, None is returned and the refs stay
        child.table = list(parent.table)
        if copy_last and child.table:
            try:
                new = self.mgr.alloc()  # clean: replaces the tail of the child's table
            except NoBlocks:
                return None
            self.mgr.decref(child.table[-1])
            child.table[-1] = new
        child.state = State.RUN
        self.running[sid] = child
        return child

    def pin_system(self, seq: Sequence) -> None:
        if seq.table:
            seq.pinned = self.mgr.incref(seq.table[0])  # leak: finish drops the table only

    def finish(self, sid: int) -> list[int]:
        seq = self.running.pop(sid)
        self._drop(seq)
        seq.state = State.DONE
        return seq.tokens

    def abort(self, sids: Iterable[int]) -> None:
        for sid in sids:
            seq = self.running.pop(sid, None)
            if seq is None or seq.state is State.DONE:
                continue
            if seq.pinned is not None:
                self.mgr.decref(seq.pinned)
                seq.pinned = None
            self._drop(seq)
            seq.state = State.ABORT


if __name__ == "__main__":
    m = BlockManager(32)
    e = Engine(m, PrefixCache(m, 4))
    s = Sequence(1, list(range(40)))
    assert e.admit_or_undo(s)
    e.prefix.insert_once(tuple(range(16)), s.table[0])
    assert e.probe(list(range(20))) == 1
    e.fork(s, 2, copy_last=True)  # clean: registered in running, finished next
    e.finish(2)
    e.finish(1)
    e.prefix.clear()
    print(m.n_free)
