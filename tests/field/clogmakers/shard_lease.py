"""Hands out the shards of a dataset to the readers of an elastic training job.

The coordinator lives with rank 0.  A shard is on lease until its reader completes it or gives it
back; a lease that is neither stays out for the rest of the epoch.
"""
import itertools
import json
import logging
import random
import threading
import uuid
from collections import deque
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class UnknownReader(KeyError):
    pass


class StateMismatch(ValueError):
    pass


class ShardCorrupt(OSError):
    pass


class Lease:
    def __init__(self, token, shard, reader):
        self.token = token
        self.shard = shard
        self.reader = reader

    def __repr__(self):
        return f"<lease {self.token[:8]} of {self.shard} for {self.reader}>"


class Coordinator:
    def __init__(self, shards, seed=0):
        order = list(shards)
        random.Random(seed).shuffle(order)
        self._todo = deque(order)
        self._leased = {}
        self._done = []
        self._readers = {}
        self._lock = threading.Lock()

    def join(self, reader):
        with self._lock:
            self._readers[reader] = {"leases": 0}

    def quit(self, reader):
        with self._lock:
            self._readers.pop(reader, None)

    def lease(self, reader):
        """The next shard, None at the end of the epoch."""
        with self._lock:
            if not self._todo:
                return None
            shard = self._todo.popleft()  # leak: for a reader that has quit the shard is neither leased nor queued again
            stats = self._readers.get(reader)
            if stats is None:
                raise UnknownReader(reader)
            stats["leases"] += 1
            lease = Lease(uuid.uuid4().hex, shard, reader)
            self._leased[lease.token] = lease
            return lease

    def lease_named(self, reader, shard):
        with self._lock:
            if reader not in self._readers:
                raise UnknownReader(reader)
            if shard not in self._todo:
                return None
            self._todo.remove(shard)  # clean: on lease from here, the lease goes to the caller
            lease = Lease(uuid.uuid4().hex, shard, reader)
            self._leased[lease.token] = lease
            return lease

    def complete(self, lease):
        with self._lock:
            del self._leased[lease.token]
            self._done.append(lease.shard)

    def give_back(self, lease):
        with self._lock:
            if self._leased.pop(lease.token, None) is not None:
                self._todo.append(lease.shard)


class Keeper(threading.Thread):
    """Gives back what is still tracked when the process is told to stop."""

    def __init__(self, coord, stop):
        super().__init__(name="lease-keeper", daemon=True)
        self.coord = coord
        self.stop_event = stop
        self._tracked = {}
        self._lock = threading.Lock()

    def track(self, lease):
        if self.stop_event.is_set():
            logger.debug("%r comes after the stop", lease)
            return False
        with self._lock:
            self._tracked[lease.token] = lease
        return True

    def untrack(self, lease):
        with self._lock:
            return self._tracked.pop(lease.token, None)

    def run(self):
        self.stop_event.wait()
        with self._lock:
            leases, self._tracked = list(self._tracked.values()), {}
        for lease in leases:
            self.coord.give_back(lease)


@contextmanager
def held(coord, reader):
    """One shard, complete when the body ends, back in the queue when it raises."""
    lease = coord.lease(reader)  # clean: completed or given back by the arms below, None when the epoch is over
    if lease is None:
        yield None
        return
    try:
        yield lease
    except BaseException:
        coord.give_back(lease)
        raise
    coord.complete(lease)


def read_all(coord, reader, open_shard, max_bad=10):
    """Samples of shard after shard until the epoch is over."""
    bad = 0
    while True:
        lease = coord.lease(reader)  # leak: a corrupt shard is counted and skipped, its lease is neither completed nor given back
        if lease is None:
            return
        try:
            for sample in open_shard(lease.shard):
                yield sample
        except ShardCorrupt as exc:
            bad += 1
            logger.warning("%r: %s", lease, exc)
            if bad > max_bad:
                coord.give_back(lease)
                raise
            continue
        except GeneratorExit:
            coord.give_back(lease)
            raise
        coord.complete(lease)


def count_samples(coord, reader, open_shard):
    total = 0
    more = True
    while more:
        with held(coord, reader) as lease:  # clean: context manager
            more = lease is not None
            if more:
                total += sum(1 for _ in open_shard(lease.shard))
    return total


class Prefetcher:
    """Opens the next shard while the current one is read."""

    def __init__(self, coord, reader, open_shard):
        self.coord, self.reader, self.open_shard = coord, reader, open_shard
        self.current = None
        self.following = None
        self.samples = 0

    def __iter__(self):
        self.current = self.coord.lease(self.reader)  # clean: near miss, completed by the loop or given back by close()
        while self.current is not None:
            self.following = self.coord.lease(self.reader)  # leak: close() in the middle of a shard gives back only the current one
            for sample in self.open_shard(self.current.shard):
                self.samples += 1
                yield sample
            self.coord.complete(self.current)
            self.current, self.following = self.following, None

    def close(self):
        if self.current is not None:
            self.coord.give_back(self.current)
        self.current = self.following = None


class Worker(threading.Thread):
    def __init__(self, coord, keeper, reader, work):
        super().__init__(name=f"reader-{reader}")
        self.coord, self.keeper, self.reader, self.work = coord, keeper, reader, work
        self.finished = 0

    def run(self):
        self.coord.join(self.reader)
        try:
            while not self.keeper.stop_event.is_set():
                lease = self.coord.lease(self.reader)  # leak: between the test and track() the stop may come, nobody has the lease then
                if lease is None:
                    return
                if not self.keeper.track(lease):
                    return
                self.work(lease.shard)
                if self.keeper.untrack(lease) is not None:
                    self.coord.complete(lease)
                    self.finished += 1
        finally:
            self.coord.quit(self.reader)


class PoliteWorker(Worker):
    """Gives back by itself, whatever happens to the work."""

    def run(self):
        self.coord.join(self.reader)
        for _ in itertools.count():
            lease = self.coord.lease(self.reader)  # clean: near miss, the flag decides between complete and give_back in finally
            if lease is None:
                break
            ok = False
            try:
                self.work(lease.shard)
                ok = not self.keeper.stop_event.is_set()
            except ShardCorrupt:
                logger.exception("%r", lease)
            finally:
                (self.coord.complete if ok else self.coord.give_back)(lease)
            if not ok:
                break
        self.coord.quit(self.reader)


class Resumed:
    def __init__(self, coord):
        self.coord = coord
        self.leases = []

    def finish(self):
        for lease in self.leases:
            self.coord.complete(lease)
        self.leases = []

    def cancel(self):
        for lease in self.leases:
            self.coord.give_back(lease)
        self.leases = []


def resume(coord, reader, blob):
    """Takes the shards again that a reader had when its state was saved."""
    leases = []
    for shard in json.loads(blob)["shards"]:
        lease = coord.lease_named(reader, shard)  # leak: a shard that is taken raises StateMismatch, those before it stay out
        if lease is None:
            raise StateMismatch(f"{shard} is not free")
        leases.append(lease)
    out = Resumed(coord)
    out.leases = leases
    return out


def replay(coord, reader, blob, work):
    try:
        mine = resume(coord, reader, blob)  # clean: finished or cancelled below
    except StateMismatch as exc:
        logger.error("cannot resume: %s", exc)
        return False
    try:
        for lease in mine.leases:
            work(lease.shard)
    except ShardCorrupt:
        mine.cancel()
        return False
    mine.finish()
    return True
