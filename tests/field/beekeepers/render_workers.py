"""Thumbnail farm: scratch directories, licence seats and GPU contexts used from a thread pool."""
from __future__ import annotations

import abc
import concurrent.futures as cf
import contextlib
import functools
import logging
import os
import shutil
import threading
from typing import Callable, Iterable, Optional

log = logging.getLogger("render")


class ScratchArea:
    """Numbered work directories below one root."""

    def __init__(self, root: str, count: int) -> None:
        self.root = root
        self._free = list(range(count))
        self._lock = threading.Lock()

    def checkout(self) -> Optional[str]:
        with self._lock:
            if not self._free:
                return None
            number = self._free.pop()
        path = os.path.join(self.root, "work%03d" % number)
        os.makedirs(path, exist_ok=True)
        return path

    def giveback(self, path: str) -> None:
        shutil.rmtree(path, ignore_errors=True)
        with self._lock:
            self._free.append(int(path[-3:]))


class SeatServer:
    """Floating licence seats of the codec library."""

    def __init__(self, seats: int) -> None:
        self._gate = threading.BoundedSemaphore(seats)
        self.denied = 0

    def sit(self, block: bool = True) -> bool:
        if self._gate.acquire(blocking=block):  # clean: stand() releases it for the caller
            return True
        self.denied += 1
        return False

    def stand(self) -> None:
        self._gate.release()


class Context:
    def __init__(self, device: int) -> None:
        self.device = device
        self.uses = 0


class ContextPool:
    def __init__(self, devices: Iterable[int]) -> None:
        self._all = [Context(d) for d in devices]
        self._free = list(self._all)
        self._cond = threading.Condition()

    def borrow(self) -> Context:
        with self._cond:
            while not self._free:
                self._cond.wait()
            context = self._free.pop()
        context.uses += 1
        return context

    def hand_in(self, context: Context) -> None:
        with self._cond:
            self._free.append(context)
            self._cond.notify()


class Task(abc.ABC):
    """One unit of rendering. setup() takes what it needs, teardown() gives it back."""

    def __init__(self, farm: "Farm", source: str) -> None:
        self.farm = farm
        self.source = source
        self.directory: Optional[str] = None

    def setup(self) -> bool:
        self.directory = self.farm.scratch.checkout()  # clean: near miss, teardown() gives it back
        return self.directory is not None

    @abc.abstractmethod
    def render(self) -> bytes: ...

    def teardown(self) -> None:
        if self.directory is not None:
            self.farm.scratch.giveback(self.directory)
            self.directory = None


class StillTask(Task):
    def render(self) -> bytes:
        return self.farm.codec.still(self.source, self.directory)


class GpuTask(Task):
    """Needs a GPU context besides the directory."""

    context: Optional[Context] = None

    def setup(self) -> bool:
        if not super().setup():
            return False
        self.context = self.farm.contexts.borrow()  # leak: the inherited teardown keeps the context
        return True

    def render(self) -> bytes:
        return self.farm.codec.gpu(self.source, self.directory, self.context.device)


class SeatTask(Task):
    """Needs a licence seat besides the directory."""

    seated = False

    def setup(self) -> bool:
        if not super().setup():
            return False
        self.seated = self.farm.seats.sit(block=False)  # clean: near miss, teardown() stands up
        return self.seated

    def render(self) -> bytes:
        return self.farm.codec.licensed(self.source, self.directory)

    def teardown(self) -> None:
        if self.seated:
            self.seated = False
            self.farm.seats.stand()
        super().teardown()


class Farm:
    def __init__(self, scratch: ScratchArea, seats: SeatServer, contexts: ContextPool, codec, workers: int):
        self.scratch = scratch
        self.seats = seats
        self.contexts = contexts
        self.codec = codec
        self.executor = cf.ThreadPoolExecutor(workers)

    def run(self, task: Task) -> Optional[bytes]:
        try:
            if not task.setup():
                return None
            return task.render()
        finally:
            task.teardown()

    def submit(self, task: Task) -> cf.Future:
        return self.executor.submit(self.run, task)

    def submit_with_context(self, job: Callable[[Context], bytes]) -> cf.Future:
        context = self.contexts.borrow()  # clean: near miss, the done callback hands it in
        future = self.executor.submit(job, context)
        future.add_done_callback(lambda _f: self.contexts.hand_in(context))
        return future

    def submit_in_directory(self, job: Callable[[str], bytes]) -> Optional[cf.Future]:
        path = self.scratch.checkout()  # clean: near miss, the partial gives it back when done
        if path is None:
            return None
        future = self.executor.submit(job, path)
        future.add_done_callback(functools.partial(self._directory_done, path))
        return future

    def _directory_done(self, path: str, future: cf.Future) -> None:
        if future.exception() is not None:
            log.warning("job in %s failed", path)
        self.scratch.giveback(path)

    def submit_seated(self, job: Callable[[], bytes]) -> Optional[cf.Future]:
        if not self.seats.sit(block=False):  # leak: the callback keeps the seat of a job without data
            return None
        future = self.executor.submit(job)
        future.add_done_callback(self._seat_done)
        return future

    def _seat_done(self, future: cf.Future) -> None:
        if not future.result():
            log.warning("seated job gave no data")
            return
        self.seats.stand()

    def contact_sheet(self, sources: list[str]) -> Optional[bytes]:
        path = self.scratch.checkout()  # leak: an empty selection returns with the directory taken
        if path is None:
            return None
        names = [s for s in sources if s.endswith((".jpg", ".png"))]
        if not names:
            log.info("nothing to show")
            return None
        tiles = [self.codec.still(name, path) for name in names]
        self.scratch.giveback(path)
        return b"".join(tiles)

    def poster(self, source: str) -> Optional[bytes]:
        with contextlib.ExitStack() as stack:
            path = self.scratch.checkout()  # clean: near miss, the exit stack gives it back
            if path is None:
                return None
            stack.callback(self.scratch.giveback, path)
            context = self.contexts.borrow()  # clean: near miss, the exit stack hands it in
            stack.callback(self.contexts.hand_in, context)
            return self.codec.gpu(source, path, context.device)

    def benchmark(self, rounds: int) -> dict[int, int]:
        uses: dict[int, int] = {}
        for _ in range(rounds):
            context = self.contexts.borrow()  # clean: handed in at the end of the round
            uses[context.device] = context.uses
            self.codec.gpu("bench.png", self.scratch.root, context.device)
            self.contexts.hand_in(context)
        return uses

    def transcode(self, source: str, licensed: bool) -> bytes:
        if licensed:
            self.seats.sit()  # clean: near miss, the same argument guards stand()
        context = self.contexts.borrow()  # clean: handed in after the pass
        data = self.codec.gpu(source, self.scratch.root, context.device)
        self.contexts.hand_in(context)
        if licensed:
            self.seats.stand()
        return data

    def transcode_best(self, source: str, licensed: bool, quality: int) -> bytes:
        if licensed:
            self.seats.sit()  # leak: stands up only above quality 50
        data = self.codec.licensed(source, self.scratch.root) if licensed else self.codec.still(source, "")
        if licensed and quality > 50:
            data = self.codec.sharpen(data)
            self.seats.stand()
        return data
