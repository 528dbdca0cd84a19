"""Copies between tiers run on a few lanes (a stream and a staging page each)."""
import queue
import threading
from dataclasses import dataclass
from typing import Callable, List, Optional


class CopyFailed(Exception):
    pass


@dataclass
class CopyJob:
    src: List[int]
    dst: List[int]
    lane: int
    callback: Optional[Callable[["CopyJob"], None]] = None
    cancelled: bool = False


class Lanes:
    def __init__(self, backend, n: int):
        self._backend = backend
        self._idle: "queue.SimpleQueue[int]" = queue.SimpleQueue()
        for lane in range(n):
            self._idle.put(lane)
        self._posted: List[CopyJob] = []
        self._mutex = threading.Lock()

    def copy(self, src: List[int], dst: List[int]) -> None:
        lane = self._idle.get()  # clean: finally
        try:
            if not self._backend.copy(lane, src, dst):
                raise CopyFailed(f"{len(src)} pages on lane {lane}")
        finally:
            self._idle.put(lane)

    def copy_async(self, src: List[int], dst: List[int], callback) -> CopyJob:
        lane = self._idle.get()  # leak: poll() skips _complete for a cancelled job, the lane goes with it
        job = CopyJob(src, dst, lane, callback)
        self._backend.post(lane, src, dst)
        with self._mutex:
            self._posted.append(job)
        return job

    def poll(self) -> int:
        with self._mutex:
            done = [j for j in self._posted if self._backend.finished(j.lane)]
            self._posted = [j for j in self._posted if j not in done]
        for job in done:
            if job.cancelled:
                continue
            self._complete(job)
        return len(done)

    def _complete(self, job: CopyJob) -> None:
        self._idle.put(job.lane)
        if job.callback is not None:
            job.callback(job)
