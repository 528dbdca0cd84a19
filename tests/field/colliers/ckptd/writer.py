from __future__ import annotations

import logging
import os
import queue
import threading
from typing import Optional

from .snapshot import Job

log = logging.getLogger("ckptd")


class Writer(threading.Thread):
    def __init__(self, root: str) -> None:
        super().__init__(daemon=True)
        self.root = root
        self.q: "queue.Queue[Optional[Job]]" = queue.Queue()
        self.written: list[int] = []

    def run(self) -> None:
        while True:
            job = self.q.get()
            if job is None:
                return
            try:
                self.write(job)
            except OSError as e:
                log.error("step %d: %s", job.step, e)
            finally:
                job.discard()

    def write(self, job: Job) -> None:
        d = os.path.join(self.root, str(job.step))
        os.makedirs(d, exist_ok=True)
        for name, lease in job.parts.items():
            f = open(os.path.join(d, name), "wb")  # leak: a cancelled job returns between parts with the file open
            f.write(lease.view())
            if job.cancelled:
                return
            f.close()
        self.written.append(job.step)


class DirectWriter:
    """No thread; used by the emergency path. Takes over the job."""

    def __init__(self, root: str) -> None:
        self.root = root

    def submit(self, job: Job) -> bool:
        if job.cancelled:
            return False
        with open(os.path.join(self.root, f"{job.step}.emergency"), "wb") as f:  # clean: with block
            for lease in job.parts.values():
                f.write(lease.view())
        job.discard()
        return True
