from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import BinaryIO, Optional

from .staging import StagingArea, StagingManager


@dataclass(eq=False)
class WriteJob:
    area: StagingArea
    out: Optional[BinaryIO] = None
    offset: int = 0
    owns_file: bool = True


class WriterThread:
    """Writes jobs in order; owns what a job carries from the moment of submit()."""

    def __init__(self, staging: StagingManager) -> None:
        self.staging = staging
        self.written = 0
        self._q: "queue.Queue[Optional[WriteJob]]" = queue.Queue()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def submit(self, job: WriteJob) -> None:
        self._q.put(job)

    def _loop(self) -> None:
        while True:
            job = self._q.get()
            if job is None:
                return
            try:
                if job.out is not None:
                    job.out.seek(job.offset)
                    self.written += job.out.write(job.area.mem[:job.area.length])
            finally:
                self.staging.relinquish(job.area)
                if job.out is not None and job.owns_file:
                    job.out.close()

    def stop(self) -> None:
        self._q.put(None)
        self._thread.join()
