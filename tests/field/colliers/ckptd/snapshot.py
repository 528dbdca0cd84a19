from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from .pinned import PinnedArena, PinnedLease


@dataclass
class Job:
    step: int
    parts: dict[str, PinnedLease] = field(default_factory=dict)
    urgent: bool = False
    cancelled: bool = False

    def discard(self) -> None:
        for lease in self.parts.values():
            lease.free()
        self.parts.clear()

    def nbytes(self) -> int:
        return sum(p.size for p in self.parts.values())


def stage(arena: PinnedArena, blob: bytes) -> Optional[PinnedLease]:
    lease = arena.alloc(len(blob))  # clean: returned to the caller
    if lease is not None:
        lease.view()[:] = blob
    return lease


def snapshot(arena: PinnedArena, step: int, state: dict[str, bytes]) -> Optional[Job]:
    """All of the state or nothing."""
    job = Job(step)
    for name, blob in state.items():
        part = stage(arena, blob)  # clean: near miss, the job discards its parts when one does not fit
        if part is None:
            job.discard()
            return None
        job.parts[name] = part
    return job


def snapshot_best_effort(arena: PinnedArena, step: int, state: dict[str, bytes], skip: frozenset[str] = frozenset()) -> Job:
    job = Job(step)
    for name, blob in state.items():
        part = stage(arena, blob)  # leak: skipped names continue after they were staged
        if part is None or name in skip:
            continue
        job.parts[name] = part
    return job
