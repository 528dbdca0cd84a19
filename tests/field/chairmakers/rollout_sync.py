"""Weight sync between an RL trainer and its rollout engines, and the leases on those engines.

Weights go out in flat buckets: pack into a bucket, broadcast, let every engine unpack.
"""
import collections
import contextlib
import functools
import logging
import threading
from typing import Callable, Iterator, NamedTuple, Optional

import torch
import torch.distributed as dist

LOG = logging.getLogger(__name__)


class LeaseDenied(Exception): ...


class EngineSick(Exception): ...


class ShapeDrift(Exception): ...


class Bucket:
    def __init__(self, ring: "BucketRing", flat: torch.Tensor):
        self.ring, self.flat, self.used = ring, flat, 0
        self.index: list[tuple[str, torch.Size, int]] = []

    def fits(self, t: torch.Tensor) -> bool:
        return self.used + t.numel() <= self.flat.numel()

    def add(self, name: str, t: torch.Tensor) -> None:
        self.flat[self.used:self.used + t.numel()].copy_(t.reshape(-1))
        self.index.append((name, t.shape, self.used))
        self.used += t.numel()

    def recycle(self) -> None:
        self.used = 0
        self.index.clear()
        self.ring._give(self)


class BucketRing:
    def __init__(self, count: int, numel: int, device: str = "cuda"):
        self._spare = collections.deque(Bucket(self, torch.empty(numel, dtype=torch.bfloat16, device=device)) for _ in range(count))
        self._cv = threading.Condition()

    def next_bucket(self) -> Bucket:
        with self._cv:
            self._cv.wait_for(lambda: self._spare)
            return self._spare.popleft()  # clean: handed to the caller

    def maybe_bucket(self) -> Optional[Bucket]:
        with self._cv:
            return self._spare.popleft() if self._spare else None  # clean: handed to the caller

    def _give(self, b: Bucket) -> None:
        with self._cv:
            self._spare.append(b)
            self._cv.notify()


class Lease(NamedTuple):
    engine: int
    token: int


class EngineTable:
    """Which engine works for whom. bump() resets all engines and voids their leases."""

    def __init__(self, engines: list):
        self.engines = engines
        self._vacant = set(range(len(engines)))
        self._tokens = iter(range(1, 1 << 60))
        self._held: dict[int, Lease] = {}
        self._mu = threading.Lock()

    def lease(self, prefer: Optional[int] = None) -> Lease:
        with self._mu:
            if not self._vacant:
                raise LeaseDenied("all engines are busy")
            which = prefer
            if prefer in self._vacant:
                self._vacant.remove(prefer)  # clean: goes out in the lease
            else:
                which = self._vacant.pop()  # clean: near miss, surrender() ignores a void lease, whose engine bump() has made vacant itself
            out = Lease(which, next(self._tokens))
            self._held[out.token] = out
            return out

    def surrender(self, lease: Lease) -> None:
        with self._mu:
            if self._held.pop(lease.token, None) is not None:
                self._vacant.add(lease.engine)

    def bump(self) -> None:
        with self._mu:
            self._vacant.update(x.engine for x in self._held.values())
            self._held.clear()


@contextlib.contextmanager
def leased(table: EngineTable, prefer: Optional[int] = None):
    lease = table.lease(prefer)  # clean: surrendered in the finally
    try:
        yield table.engines[lease.engine]
    finally:
        table.surrender(lease)


def with_engine(fn: Callable) -> Callable:
    """Decorator: the first argument becomes an engine for the length of the call."""
    @functools.wraps(fn)
    def wrapper(table: EngineTable, *args, **kwargs):
        lease = table.lease()  # clean: near miss, both the except and the else surrender it
        try:
            out = fn(table.engines[lease.engine], *args, **kwargs)
        except Exception:
            table.surrender(lease)
            raise
        else:
            table.surrender(lease)
        return out
    return wrapper


@with_engine
def perplexity(engine, tokens: list[int]) -> float:
    return engine.score(tokens)


def pack(named: Iterator[tuple[str, torch.Tensor]], ring: BucketRing) -> Iterator[Bucket]:
    """Full buckets, one by one; whoever takes them recycles them."""
    bucket = ring.next_bucket()  # leak: a tensor larger than a bucket raises ShapeDrift with this one half full
    for name, tensor in named:
        if tensor.numel() > bucket.flat.numel():
            raise ShapeDrift(f"{name}: {tensor.numel()} elements")
        if not bucket.fits(tensor):
            yield bucket
            bucket = ring.next_bucket()  # leak: the same raise, for every bucket after the first
        bucket.add(name, tensor)
    yield bucket


class Sync:
    def __init__(self, model: torch.nn.Module, ring: BucketRing, table: EngineTable, group=None):
        self.model, self.ring, self.table, self.group = model, ring, table, group
        self.version = 0
        self.inflight: collections.deque = collections.deque()
        self.mirror: dict[str, Bucket] = {}

    def push(self) -> bool:
        try:
            for bucket in pack(self.model.named_parameters(), self.ring):  # leak: when ShapeDrift comes the queue is cleared with the buckets that _retire() would have recycled
                work = dist.broadcast(bucket.flat[:bucket.used], src=0, group=self.group, async_op=True)
                self.inflight.append((work, bucket))
                self._retire(keep=2)
        except ShapeDrift as exc:
            LOG.error("sync aborted: %s", exc)
            self.inflight.clear()
            return False
        self._retire(keep=0)
        self.version += 1
        return True

    def _retire(self, keep: int) -> None:
        while len(self.inflight) > keep:
            work, bucket = self.inflight.popleft()
            work.wait()
            for e in self.table.engines:
                e.unpack(bucket.flat, bucket.index)
            bucket.recycle()

    def push_one(self, name: str) -> bool:
        bucket = self.ring.maybe_bucket()  # clean: the finally stands around everything that follows
        try:
            if bucket is None:
                return False
            param = dict(self.model.named_parameters()).get(name)
            if param is None or not bucket.fits(param):
                return False
            bucket.add(name, param)
            dist.broadcast(bucket.flat[:bucket.used], src=0, group=self.group)
            return True
        finally:
            if bucket is not None:
                bucket.recycle()

    def keep_mirror(self, prefix: str) -> int:
        """A copy of some weights from which a bad update can be undone."""
        bucket = self.ring.next_bucket()  # leak: a prefix that is mirrored already has its bucket replaced
        for name, p in self.model.named_parameters():
            if name.startswith(prefix) and bucket.fits(p):
                bucket.add(name, p)
        if not bucket.index:
            bucket.recycle()
            return 0
        self.mirror[prefix] = bucket
        return len(bucket.index)

    def undo(self, prefix: str) -> None:
        bucket = self.mirror.pop(prefix)
        params = dict(self.model.named_parameters())
        for name, shape, at in bucket.index:
            params[name].data.copy_(bucket.flat[at:at + shape.numel()].view(shape))
        bucket.recycle()


class Rollouts:
    def __init__(self, table: EngineTable, sync: Sync):
        self.table, self.sync = table, sync
        self.open: dict[str, Lease] = {}

    def begin(self, group_id: str, prompts: list[str]) -> bool:
        if group_id in self.open:
            return True
        try:
            lease = self.table.lease(prefer=hash(group_id) % len(self.table.engines))  # leak: for a sick engine it is neither surrendered nor entered in the table
        except LeaseDenied:
            return False
        engine = self.table.engines[lease.engine]
        if not engine.healthy():
            LOG.warning("engine %d is sick", lease.engine)
            return False
        engine.enqueue(group_id, prompts)
        self.open[group_id] = lease
        return True

    def poll(self, group_id: str) -> Optional[list[str]]:
        lease = self.open[group_id]
        result = self.table.engines[lease.engine].take(group_id)
        if result is not None:
            self.table.surrender(self.open.pop(group_id))
        return result

    def evaluate(self, prompts: list[str]) -> list[str]:
        with leased(self.table) as engine:  # clean: with statement
            if not engine.healthy():
                raise EngineSick()
            return engine.generate(prompts)

    def race(self, prompt: str) -> str:
        a = self.table.lease()  # clean: near miss, the outer finally covers the denial of the second
        try:
            b = self.table.lease()  # clean: the inner finally
            try:
                outs = [self.table.engines[x.engine].generate([prompt])[0] for x in (a, b)]
            finally:
                self.table.surrender(b)
        finally:
            self.table.surrender(a)
        return max(outs, key=len)

    def new_policy(self) -> None:
        if self.sync.push():
            self.table.bump()
