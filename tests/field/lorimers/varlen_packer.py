"""Packs variable-length sequences into the rows of a fixed decode batch."""
from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Dict, Iterable, Iterator, List, Optional, Tuple


@dataclass
class Seq:
    sid: int
    length: int
    row: Optional[int] = None
    finished: bool = False


class RowPool:
    def __init__(self, rows: int) -> None:
        self._heap = list(range(rows))
        self.rows = rows

    def take_row(self) -> Optional[int]:
        return heapq.heappop(self._heap) if self._heap else None

    def return_row(self, row: int) -> None:
        heapq.heappush(self._heap, row)

    @property
    def taken(self) -> int:
        return self.rows - len(self._heap)


class RowLease:
    """A row that is returned by `close` unless it was detached."""

    def __init__(self, pool: RowPool) -> None:
        self.pool = pool
        self.row = pool.take_row()  # clean: returned by close, or detached to the caller
        self._mine = True

    def detach(self) -> Optional[int]:
        self._mine = False
        return self.row

    def close(self) -> None:
        if self._mine and self.row is not None:
            self.pool.return_row(self.row)
        self._mine = False

    def __enter__(self) -> "RowLease":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


class VarlenPacker:
    def __init__(self, pool: RowPool, max_len: int) -> None:
        self.pool = pool
        self.max_len = max_len
        self.active: Dict[int, Seq] = {}

    def add(self, seq: Seq) -> bool:
        if seq.sid in self.active:
            return False
        with RowLease(self.pool) as lease:  # clean: near miss, closed by the with or detached into the active sequence
            if lease.row is None or seq.length > self.max_len:
                return False
            seq.row = lease.detach()
            self.active[seq.sid] = seq
        return True

    def add_batch(self, seqs: Iterable[Seq]) -> int:
        added = 0
        for seq in seqs:
            if seq.sid in self.active:
                continue
            row = self.pool.take_row()  # leak: over-long sequences are skipped with the row taken
            if row is None:
                break
            if seq.length > self.max_len:
                continue
            seq.row = row
            self.active[seq.sid] = seq
            added += 1
        return added

    def fits(self, seq: Seq) -> bool:
        lease = RowLease(self.pool)  # leak: detach for the number, and the row is not kept anywhere
        row = lease.detach()
        lease.close()
        return row is not None and seq.length <= self.max_len

    def remove(self, sid: int) -> None:
        seq = self.active.pop(sid, None)
        if seq is not None and seq.row is not None:
            self.pool.return_row(seq.row)
            seq.row = None

    def sweep(self) -> int:
        gone = [s.sid for s in self.active.values() if s.finished]
        for sid in gone:
            self.remove(sid)
        return len(gone)

    def compact(self) -> int:
        """Move sequences to lower rows where there are some."""
        moved = 0
        for seq in sorted(self.active.values(), key=lambda s: -s.row):
            low = self.pool.take_row()  # clean: near miss, either it or the older row is returned
            if low is None:
                break
            if low < seq.row:
                seq.row, low = low, seq.row
                moved += 1
            self.pool.return_row(low)
        return moved

    def relocate(self, sid: int) -> bool:
        seq = self.active[sid]
        target = self.pool.take_row()  # leak: a target that is no lower than the present row is forgotten
        if target is None:
            return False
        if target < seq.row:
            seq.row, old = target, seq.row
            self.pool.return_row(old)
            return True
        return False

    def rows_for(self, n: int) -> Iterator[int]:
        """Temporary rows, each good until the next is asked for."""
        for _ in range(n):
            row = self.pool.take_row()  # clean: finally returns it before the next turn
            if row is None:
                return
            try:
                yield row
            finally:
                self.pool.return_row(row)

    def offsets(self) -> List[Tuple[int, int]]:
        acc, out = 0, []
        for seq in sorted(self.active.values(), key=lambda s: s.row):
            out.append((seq.row, acc))
            acc += seq.length
        return out


def main() -> None:
    pool = RowPool(8)
    pk = VarlenPacker(pool, 100)
    print([pk.add(Seq(i, 30 * i)) for i in range(6)])
    pk.active[1].finished = True
    print(pk.sweep(), pk.compact(), list(pk.rows_for(2)), pk.offsets())
    for sid in list(pk.active):
        pk.remove(sid)
    print("taken", pool.taken)
    pk.add_batch([Seq(9, 500)])
    pk.fits(Seq(10, 1))
    print("taken", pool.taken)


if __name__ == "__main__":
    main()
