"""Asynchronous training checkpoints: snapshot buffers, gradient bucket hooks, a writer thread."""
from __future__ import annotations

import logging
import os
import queue
import tempfile
import threading
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

try:
    import torch
except ImportError:
    torch = None

logger = logging.getLogger(__name__)


class Bucket:
    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.values = [0.0] * numel


class BucketPool:
    def __init__(self, count: int, numel: int) -> None:
        self._parked = [Bucket(numel) for _ in range(count)]
        self._cv = threading.Condition()

    def draw(self) -> Bucket:
        """Waits for a bucket."""
        with self._cv:
            while not self._parked:
                self._cv.wait()
            return self._parked.pop()

    def park(self, bucket: Bucket) -> None:
        with self._cv:
            self._parked.append(bucket)
            self._cv.notify()

    def parked(self) -> int:
        return len(self._parked)


class GradReducer:
    def __init__(self, pool: BucketPool, world: int) -> None:
        self.pool = pool
        self.world = world
        self.in_flight: List[Tuple[str, Bucket]] = []
        self.shards: Dict[str, Bucket] = {}

    def on_grad(self, name: str, grad: Sequence[float]) -> None:
        bucket = self.pool.draw()  # clean: in in_flight, wait_all parks it
        bucket.values[: len(grad)] = grad
        self.in_flight.append((name, bucket))

    def wait_all(self, apply: Callable[[str, Bucket], None]) -> None:
        while self.in_flight:
            name, bucket = self.in_flight.pop()
            apply(name, bucket)
            self.pool.park(bucket)

    def accumulate(self, name: str, grad: Sequence[float]) -> None:
        bucket = self.shards.get(name)
        if bucket is None:
            bucket = self.shards[name] = self.pool.draw()  # leak: zero_grad clears the table without parking
        for i, g in enumerate(grad):
            bucket.values[i] += g

    def take_shard(self, name: str) -> List[float]:
        bucket = self.shards.pop(name)
        values = list(bucket.values)
        self.pool.park(bucket)
        return values

    def zero_grad(self) -> None:
        self.shards.clear()

    def norm(self, grads: Sequence[Sequence[float]]) -> float:
        bucket = self.pool.draw()  # clean: near miss, a break on overflow still comes to park
        total = 0.0
        for grad in grads:
            bucket.values[: len(grad)] = [g * g for g in grad]
            total += sum(bucket.values[: len(grad)])
            if total > 1e30:
                break
        self.pool.park(bucket)
        return total ** 0.5


class AsyncCheckpointer:
    def __init__(self, pool: BucketPool, directory: str) -> None:
        self.pool = pool
        self.directory = directory
        self.save_lock = threading.Lock()
        self.meta_lock = threading.Lock()
        self._jobs: "queue.Queue[Optional[Tuple[str, Bucket]]]" = queue.Queue()
        self.failed: List[str] = []

    def snapshot(self, name: str, values: Sequence[float]) -> None:
        bucket = self.pool.draw()  # clean: near miss, the writer thread parks it in finally, a failed write included
        bucket.values[: len(values)] = values
        self._jobs.put((name, bucket))

    def write_loop(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            name, bucket = job
            try:
                with open(os.path.join(self.directory, name), "w") as fh:  # clean: with
                    fh.write(",".join(map(str, bucket.values)))
            except OSError:
                self.failed.append(name)
                continue
            finally:
                self.pool.park(bucket)

    def stop(self) -> None:
        self._jobs.put(None)

    def save_now(self, name: str, values: Sequence[float], overwrite: bool = True) -> bool:
        self.save_lock.acquire()  # leak: an existing file with overwrite off returns with the lock
        path = os.path.join(self.directory, name)
        if os.path.exists(path) and not overwrite:
            return False
        try:
            with open(path, "w") as fh:  # clean: with
                fh.write(",".join(map(str, values)))
        finally:
            self.save_lock.release()
        return True

    def save_if_idle(self, name: str, values: Sequence[float]) -> bool:
        got = self.save_lock.acquire(blocking=False)  # clean: near miss, got decides the release in finally too
        try:
            if not got:
                return False
            path = os.path.join(self.directory, name)
            with open(path, "w") as fh:  # clean: with
                fh.write(str(len(values)))
            return True
        finally:
            if got:
                self.save_lock.release()

    def publish(self, name: str, step: int) -> bool:
        self.save_lock.acquire()  # clean: released behind the meta lock's branch on both ways
        if not self.meta_lock.acquire(timeout=0.1):  # clean: near miss, a timeout took nothing, otherwise released
            self.save_lock.release()
            return False
        try:
            tmp = os.path.join(self.directory, name + ".tmp")
            with open(tmp, "w") as fh:  # clean: with
                fh.write(str(step))
            os.replace(tmp, os.path.join(self.directory, name))
        finally:
            self.meta_lock.release()
            self.save_lock.release()
        return True

    def latest(self, names: Sequence[str]) -> Optional[str]:
        for name in names:
            self.meta_lock.acquire()  # leak: the found name is returned with the lock taken
            if os.path.exists(os.path.join(self.directory, name)):
                return name
            self.meta_lock.release()
        return None


if __name__ == "__main__":
    pool = BucketPool(2, 4)
    red = GradReducer(pool, 2)
    red.on_grad("w", [1.0, 2.0])
    red.wait_all(lambda n, b: None)
    assert red.norm([[3.0, 4.0]]) == 5.0
    with tempfile.TemporaryDirectory() as tmp:
        ck = AsyncCheckpointer(pool, tmp)
        thread = threading.Thread(target=ck.write_loop)
        thread.start()
        for i in range(4):
            ck.snapshot(f"s{i}", [1.0])
        ck.stop()
        thread.join()
        assert ck.save_now("a", [1.0]) and ck.save_if_idle("b", []) and ck.publish("c", 3)
        assert pool.parked() == 2
