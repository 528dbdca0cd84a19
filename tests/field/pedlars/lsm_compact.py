"""LSM tree: table handles with reference counts, versions, merge iterators and the compaction budget."""
import logging
import threading
from typing import Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

log = logging.getLogger("lsm")

Row = Tuple[bytes, bytes]


class Table:
    def __init__(self, number: int, level: int, rows: Sequence[Row]) -> None:
        self.number = number
        self.level = level
        self.rows = list(rows)
        self.refs = 1

    @property
    def smallest(self) -> bytes:
        return self.rows[0][0]

    @property
    def largest(self) -> bytes:
        return self.rows[-1][0]


class TableCache:
    """Counts references; the file is removed with the last one."""

    def __init__(self, remove: Callable[[int], None]) -> None:
        self._tables: Dict[int, Table] = {}
        self._remove = remove
        self._mu = threading.Lock()

    def register(self, table: Table) -> None:
        self._tables[table.number] = table

    def ref(self, number: int) -> Optional[Table]:
        with self._mu:
            t = self._tables.get(number)
            if t is not None:
                t.refs += 1
            return t

    def unref(self, table: Table) -> None:
        with self._mu:
            table.refs -= 1
            dead = table.refs == 0
            if dead:
                del self._tables[table.number]
        if dead:
            self._remove(table.number)


class IoBudget:
    """Permits for background reads, a number of units at a time."""

    def __init__(self, units: int) -> None:
        self.available = units
        self._cv = threading.Condition()

    def enter(self, units: int) -> int:
        with self._cv:
            while self.available < units:
                self._cv.wait()
            self.available -= units
            return units

    def leave(self, units: int) -> None:
        with self._cv:
            self.available += units
            self._cv.notify_all()


class Version:
    """A set of tables; holds one reference for each until it is dismissed."""

    def __init__(self, cache: TableCache, numbers: Iterable[int]) -> None:
        self.cache = cache
        self.tables: List[Table] = []
        for n in numbers:
            t = cache.ref(n)  # clean: near miss, dismiss() drops the references
            if t is not None:
                self.tables.append(t)

    def overlapping(self, lo: bytes, hi: bytes) -> List[Table]:
        return [t for t in self.tables if not (t.largest < lo or t.smallest > hi)]

    def dismiss(self) -> None:
        for t in self.tables:
            self.cache.unref(t)
        self.tables = []


class Cursor:
    """Walks one table; owns a reference."""

    def __init__(self, cache: TableCache, number: int) -> None:
        self.cache = cache
        self.table = cache.ref(number)  # clean: near miss, shut() drops it
        self.at = 0

    def peek(self) -> Optional[Row]:
        if self.table is None or self.at >= len(self.table.rows):
            return None
        return self.table.rows[self.at]

    def step(self) -> None:
        self.at += 1

    def shut(self) -> None:
        if self.table is not None:
            self.cache.unref(self.table)
            self.table = None


class TailCursor(Cursor):
    """Also keeps the sibling table, to go on there."""

    def __init__(self, cache: TableCache, number: int, sibling: int) -> None:
        super().__init__(cache, number)
        self.sibling = cache.ref(sibling)  # leak: shut() is inherited and knows only the first table

    def hop(self) -> Optional[Row]:
        row = self.peek()
        if row is None and self.sibling is not None and self.sibling.rows:
            return self.sibling.rows[0]
        return row


class Compactor:
    def __init__(self, cache: TableCache, budget: IoBudget) -> None:
        self.cache = cache
        self.budget = budget
        self.next_number = 1
        self.picked = 0

    def merge(self, numbers: Sequence[int]) -> List[Row]:
        cursors = [Cursor(self.cache, n) for n in numbers]  # clean: near miss, all shut in finally
        out: List[Row] = []
        try:
            while True:
                heads = [(c.peek(), i) for i, c in enumerate(cursors)]
                heads = [h for h in heads if h[0] is not None]
                if not heads:
                    return out
                row, i = min(heads)
                cursors[i].step()
                if out and out[-1][0] == row[0]:
                    continue
                out.append(row)
        finally:
            for c in cursors:
                c.shut()

    def first_keys(self, numbers: Sequence[int]) -> List[bytes]:
        keys: List[bytes] = []
        for n in numbers:
            c = Cursor(self.cache, n)  # leak: continue for a known key comes before shut()
            row = c.peek()
            if row is None or row[0] in keys:
                continue
            keys.append(row[0])
            c.shut()
        return keys

    def scan(self, number: int, limit: int) -> Iterator[Row]:
        c = Cursor(self.cache, number)  # leak: the return at the limit is before shut()
        n = 0
        row = c.peek()
        while row is not None:
            yield row
            n += 1
            if n == limit:
                return
            c.step()
            row = c.peek()
        c.shut()

    def pick(self, lo: bytes, hi: bytes, numbers: Iterable[int]) -> List[int]:
        version = Version(self.cache, numbers)  # leak: nothing to pick returns before dismiss()
        inputs = version.overlapping(lo, hi)
        if len(inputs) < 2:
            return []
        self.picked += len(inputs)
        chosen = [t.number for t in inputs]
        version.dismiss()
        return chosen

    def bytes_in_range(self, lo: bytes, hi: bytes, numbers: Iterable[int]) -> int:
        version = Version(self.cache, numbers)  # clean: dismissed before the return
        size = sum(len(v) for t in version.overlapping(lo, hi) for _, v in t.rows)
        version.dismiss()
        return size

    def run(self, numbers: Sequence[int], level: int) -> Optional[Table]:
        units = self.budget.enter(len(numbers))  # leak: an empty merge keeps the units
        rows = self.merge(numbers)
        if not rows:
            log.info("nothing left of %s", list(numbers))
            return None
        table = Table(self.next_number, level, rows)
        self.next_number += 1
        self.cache.register(table)
        self.budget.leave(units)
        return table

    def verify(self, number: int) -> bool:
        self.budget.enter(2)  # leak: the two units are never left
        ok = self.merge([number]) == sorted(self.merge([number]))
        if ok:
            log.debug("table %d is in order", number)
        return ok

    def deep_verify(self, numbers: Sequence[int]) -> int:
        bad = 0
        for n in numbers:
            self.budget.enter(2)  # clean: near miss, the same amount is left each round
            rows = self.merge([n])
            if any(a[0] >= b[0] for a, b in zip(rows, rows[1:])):
                bad += 1
            self.budget.leave(2)
        return bad


class VersionSet:
    def __init__(self, cache: TableCache) -> None:
        self.cache = cache
        self.current = Version(cache, [])  # clean: dismissed by install()
        self.snapshots: Dict[int, Version] = {}
        self._next = 0

    def install(self, numbers: Sequence[int]) -> None:
        old = self.current
        self.current = Version(self.cache, numbers)  # clean: near miss, the next install() dismisses it
        old.dismiss()

    def snapshot(self) -> int:
        self._next += 1
        held = Version(self.cache, [t.number for t in self.current.tables])  # clean: released by id
        self.snapshots[self._next] = held
        return self._next

    def release_snapshot(self, snap: int) -> None:
        held = self.snapshots.pop(snap, None)
        if held is not None:
            held.dismiss()

    def same_level(self, a: int, b: int) -> bool:
        ta = self.cache.ref(a)  # clean: unref where it is there
        tb = self.cache.ref(b)  # leak: kept when a is missing and b is not
        if ta is None:
            return False
        same = tb is not None and ta.level == tb.level
        if tb is not None:
            self.cache.unref(tb)
        self.cache.unref(ta)
        return same
