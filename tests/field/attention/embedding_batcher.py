"""Groups embedding requests into micro-batches. Plain threads, one worker."""
import logging
import queue
import threading
import time
from concurrent.futures import Future
from typing import Dict, List, NamedTuple, Optional

import torch

LOGGER = logging.getLogger("batcher")


class Job(NamedTuple):
    fut: Future
    ids: List[int]
    lane: int


class Lanes:
    def __init__(self, n: int, width: int):
        self.tokens = torch.zeros(n, width, dtype=torch.long)
        self._sem = threading.Semaphore(n)
        self._mu = threading.Lock()
        self._open = list(range(n))

    def enter(self) -> int:
        self._sem.acquire()  # clean: leave releases the permit together with the lane
        with self._mu:
            return self._open.pop()

    def enter_nowait(self) -> Optional[int]:
        if not self._sem.acquire(blocking=False):  # clean: near miss, without a permit None is returned and leave does the rest
            return None
        with self._mu:
            return self._open.pop()

    def leave(self, lane: int) -> None:
        self.tokens[lane].zero_()
        with self._mu:
            self._open.append(lane)
        self._sem.release()

    def idle(self) -> int:
        return len(self._open)


class Batcher:
    def __init__(self, lanes: Lanes, model: torch.nn.Module, max_len: int, window_s: float = 0.005):
        self.lanes = lanes
        self.model = model
        self.max_len = max_len
        self.window_s = window_s
        self.inbox: "queue.Queue[Optional[Job]]" = queue.Queue()
        self.stats_lock = threading.Lock()
        self.served = 0
        self.hot: Dict[str, int] = {}

    def submit(self, ids: List[int]) -> Future:
        if len(ids) > self.max_len:
            raise ValueError("too long")
        lane = self.lanes.enter()  # clean: travels in the job, the worker leaves the lane
        self.lanes.tokens[lane, : len(ids)] = torch.tensor(ids)
        fut: Future = Future()
        self.inbox.put(Job(fut, ids, lane))
        return fut

    def submit_late_check(self, ids: List[int]) -> Future:
        lane = self.lanes.enter()  # leak: the raise for a long text comes after the entry
        if len(ids) > self.max_len:
            raise ValueError("too long")
        self.lanes.tokens[lane, : len(ids)] = torch.tensor(ids)
        fut: Future = Future()
        self.inbox.put(Job(fut, ids, lane))
        return fut

    def try_submit(self, ids: List[int]) -> Optional[Future]:
        lane = self.lanes.enter_nowait()  # clean: travels in the job
        if lane is None:
            return None
        fut: Future = Future()
        self.lanes.tokens[lane, : len(ids)] = torch.tensor(ids)
        self.inbox.put(Job(fut, ids, lane))
        return fut

    def run_inline(self, ids: List[int]) -> Optional[torch.Tensor]:
        for attempt in range(3):
            lane = self.lanes.enter_nowait()  # clean: near miss, only a failed try goes on with the loop
            if lane is None:
                time.sleep(0.01 * (attempt + 1))
                continue
            self.lanes.tokens[lane, : len(ids)] = torch.tensor(ids)
            out = self.model(self.lanes.tokens[lane, : len(ids)])
            self.lanes.leave(lane)
            return out
        return None

    def run_inline_retry(self, ids: List[int]) -> Optional[torch.Tensor]:
        for _ in range(3):
            lane = self.lanes.enter()  # leak: a failed forward is swallowed and the next round enters another lane
            try:
                self.lanes.tokens[lane, : len(ids)] = torch.tensor(ids)
                out = self.model(self.lanes.tokens[lane, : len(ids)])
            except RuntimeError:
                LOGGER.exception("inline forward failed, retrying")
                continue
            self.lanes.leave(lane)
            return out
        return None

    def run_inline_once(self, ids: List[int]) -> Optional[torch.Tensor]:
        lane = self.lanes.enter()  # clean: near miss, the swallowing handler leaves the lane too
        try:
            self.lanes.tokens[lane, : len(ids)] = torch.tensor(ids)
            out = self.model(self.lanes.tokens[lane, : len(ids)])
        except RuntimeError:
            LOGGER.exception("inline forward failed")
            self.lanes.leave(lane)
            return None
        self.lanes.leave(lane)
        return out

    def _gather(self) -> List[Job]:
        jobs: List[Job] = []
        end = time.monotonic() + self.window_s
        while time.monotonic() < end and len(jobs) < 16:
            try:
                job = self.inbox.get(timeout=self.window_s)
            except queue.Empty:
                break
            if job is None:
                self.inbox.put(None)
                break
            jobs.append(job)
        return jobs

    def work_once(self) -> int:
        jobs = self._gather()
        for j in jobs:
            j.fut.set_result(self.model(self.lanes.tokens[j.lane, : len(j.ids)]))
            self.lanes.leave(j.lane)
        self.count(len(jobs))
        return len(jobs)

    def count(self, n: int) -> None:
        self.stats_lock.acquire()  # clean: released on the next line but one
        self.served += n
        self.stats_lock.release()

    def report(self) -> Optional[str]:
        self.stats_lock.acquire()  # leak: nothing served means None with the lock held
        if self.served == 0:
            return None
        text = f"served {self.served}"
        self.stats_lock.release()
        return text

    def pin_hot(self, key: str, ids: List[int]) -> None:
        if key in self.hot:
            return
        lane = self.lanes.enter()  # clean: stored under a new key, unpin_all leaves it
        self.lanes.tokens[lane, : len(ids)] = torch.tensor(ids)
        self.hot[key] = lane

    def unpin_all(self) -> None:
        for lane in self.hot.values():
            self.lanes.leave(lane)
        self.hot.clear()

    def drain_check(self, n: int) -> bool:
        lanes = []
        for _ in range(n):
            lane = self.lanes.enter_nowait()  # leak: the lanes gathered so far are not left when one is refused
            if lane is None:
                return False
            lanes.append(lane)
        for lane in lanes:
            self.lanes.leave(lane)
        return True
