from __future__ import annotations

import logging
import tempfile
from typing import Optional

from .pinned import PinnedArena
from .snapshot import Job, snapshot, snapshot_best_effort
from .writer import DirectWriter, Writer

log = logging.getLogger("ckptd")


class Daemon:
    def __init__(self, root: str, nbytes: int) -> None:
        self.arena = PinnedArena(nbytes)
        self.writer = Writer(root)
        self.direct = DirectWriter(root)
        self.held: Optional[Job] = None
        self.last_step = -1
        self.writer.start()

    def save(self, step: int, state: dict[str, bytes]) -> bool:
        job = snapshot(self.arena, step, state)  # clean: queued, the writer thread discards it
        if job is None:
            return False
        self.writer.q.put(job)
        self.last_step = step
        return True

    def save_if_newer(self, step: int, state: dict[str, bytes]) -> bool:
        job = snapshot(self.arena, step, state)  # leak: an old step returns with the whole job
        if job is None or step <= self.last_step:
            return False
        self.writer.q.put(job)
        self.last_step = step
        return True

    def hold(self, step: int, state: dict[str, bytes]) -> None:
        """Keep the newest snapshot in memory; written out only on failure."""
        job = snapshot_best_effort(self.arena, step, state)  # clean: near miss, the one held before is discarded
        prev, self.held = self.held, job
        if prev is not None:
            prev.discard()

    def emergency(self) -> bool:
        job, self.held = self.held, None
        if job is None:
            return False
        job.urgent = True
        return self.direct.submit(job)

    def preempt_save(self, step: int, state: dict[str, bytes], deadline_hit: bool) -> bool:
        job = snapshot(self.arena, step, state)  # leak: the direct writer refuses a cancelled job without discarding it
        if job is None:
            return False
        job.cancelled = deadline_hit
        return self.direct.submit(job)

    def close(self) -> None:
        self.writer.q.put(None)
        self.writer.join()
        if self.held is not None:
            self.held.discard()
            self.held = None


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as d:
        dm = Daemon(d, 1024)
        dm.save(1, {"w": b"abc", "b": b"de"})
        dm.hold(2, {"w": b"abc"})
        dm.hold(3, {"w": b"abd"})
        dm.emergency()
        dm.close()
        print(dm.writer.written, dm.arena.free_bytes())
