"""Decode batch: sequences hold a row of the batch tensor while they run."""
from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Status(enum.Enum):
    RUNNING = 1
    DONE = 2
    FAILED = 3


class RowAllocator:
    def __init__(self, rows: int) -> None:
        self._rows = set(range(rows))

    def assign(self) -> int:
        return self._rows.pop()

    def unassign(self, row: int) -> None:
        self._rows.add(row)

    def __len__(self) -> int:
        return len(self._rows)


@dataclass
class Sequence:
    uid: str
    row: int = -1
    status: Status = Status.RUNNING


@dataclass
class DecodeBatch:
    rows: RowAllocator
    live: list[Sequence] = field(default_factory=list)
    probes: list[Sequence] = field(default_factory=list)

    def join(self, uid: str) -> Sequence | None:
        if not len(self.rows):
            return None
        seq = Sequence(uid)
        seq.row = self.rows.assign()  # clean: near miss, sweep gives back the rows of all that stopped, drain the rest
        self.live.append(seq)
        return seq

    def sweep(self) -> int:
        stopped = [s for s in self.live if s.status is not Status.RUNNING]
        self.live = [s for s in self.live if s.status is Status.RUNNING]
        for seq in stopped:
            self.rows.unassign(seq.row)
        return len(stopped)

    def drain(self) -> None:
        while self.live:
            self.rows.unassign(self.live.pop().row)
        for seq in self.probes:
            self.rows.unassign(seq.row)
        self.probes.clear()

    def join_probe(self, uid: str) -> bool:
        if not len(self.rows):
            return False
        self.probes.append(Sequence(uid, self.rows.assign()))  # leak: sweep_probes filters finished ones away with their rows
        return True

    def sweep_probes(self) -> int:
        before = len(self.probes)
        self.probes = [s for s in self.probes if s.status is Status.RUNNING]
        return before - len(self.probes)

    def replay(self, uid: str, steps: int) -> int:
        row = self.rows.assign()  # clean: near miss, nested loops with returns, all inside try/finally
        try:
            for step in range(steps):
                for seq in self.live:
                    if seq.uid == uid:
                        return step
                if step > 100:
                    return -1
            return steps
        finally:
            self.rows.unassign(row)

    def validate(self, uids: list[str]) -> bool:
        seq = Sequence("validate", self.rows.assign())  # leak: a duplicate raises with the row still assigned
        if len(set(uids)) != len(uids):
            raise ValueError("duplicate uid")
        seq.status = Status.DONE
        self.rows.unassign(seq.row)
        return True
