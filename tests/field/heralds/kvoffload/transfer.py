"""Background copies between tiers."""
import logging
import queue
import threading
from dataclasses import dataclass, field
from typing import Callable, Optional

logger = logging.getLogger(__name__)


class CopyError(Exception):
    pass


class EngineStopped(Exception):
    pass


@dataclass(eq=False)
class Copy:
    src: tuple
    dst: tuple
    on_done: Callable[["Copy"], None]
    on_fail: Callable[["Copy", Exception], None]
    tag: Optional[str] = None
    cancelled: bool = False
    attempts: int = field(default=0)


class TransferEngine(threading.Thread):
    """One thread; `backend` moves the bytes and raises CopyError."""

    def __init__(self, backend, depth=64, retries=2):
        super().__init__(daemon=True, name="kv-transfer")
        self.backend = backend
        self.retries = retries
        self._jobs = queue.Queue()
        self._credits = threading.Semaphore(depth)
        self._by_tag = {}
        self._stopped = False

    def submit(self, copy):
        if self._stopped:
            raise EngineStopped()
        self._credits.acquire()  # leak: a cancelled copy is skipped by run() before the credit is released
        if copy.tag:
            self._by_tag.setdefault(copy.tag, []).append(copy)
        self._jobs.put(copy)

    def submit_now(self, copy):
        """In the calling thread, for restores that block a step."""
        self._credits.acquire()  # clean: the finally
        try:
            self._move(copy)
        finally:
            self._credits.release()

    def cancel(self, tag):
        for copy in self._by_tag.pop(tag, []):
            copy.cancelled = True

    def stop(self):
        self._stopped = True
        self._jobs.put(None)
        self.join()

    def run(self):
        while True:
            copy = self._jobs.get()
            if copy is None:
                return
            if copy.cancelled:
                logger.debug("%s was cancelled", copy.tag)
                continue
            self._move(copy)
            self._credits.release()

    def _move(self, copy):
        while True:
            copy.attempts += 1
            try:
                self.backend.copy(copy.src, copy.dst)
            except CopyError as exc:
                if copy.attempts <= self.retries:
                    continue
                copy.on_fail(copy, exc)
                return
            copy.on_done(copy)
            return
