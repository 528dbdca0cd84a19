"""Gradient buckets reduced over one flat communication arena.

The arena is registered once with NCCL, so everything that is reduced has to lie
in it. Regions are carved out first fit and merged when they come back.
"""
import contextlib
import functools
import logging
import threading

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)


class ArenaFull(RuntimeError):
    pass


class ReduceTimeout(RuntimeError):
    pass


class Region:
    __slots__ = ("start", "numel", "tag")

    def __init__(self, start, numel, tag):
        self.start = start
        self.numel = numel
        self.tag = tag


class Arena:
    def __init__(self, numel, dtype=torch.float32, device="cuda"):
        self.base = torch.empty(numel, dtype=dtype, device=device)
        self.holes = [(0, numel)]
        self.lock = threading.Lock()

    def view(self, region):
        return self.base[region.start:region.start + region.numel]

    def carve(self, numel, tag):
        with self.lock:
            for i, hole in enumerate(self.holes):
                if hole[1] >= numel:
                    break
            else:
                raise ArenaFull("%s: no hole of %d elements" % (tag, numel))
            start, length = self.holes.pop(i)  # clean: near miss, the tail is a hole again and the front is handed out
            if length > numel:
                self.holes.insert(i, (start + numel, length - numel))
            return Region(start, numel, tag)

    def carve_aligned(self, numel, align, tag):
        with self.lock:
            for i, (start, length) in enumerate(self.holes):
                if length >= numel + (-start % align):
                    break
            else:
                raise ArenaFull("%s: no aligned hole of %d elements" % (tag, numel))
            start, length = self.holes.pop(i)  # leak: the padding before the aligned start belongs to no hole and no region
            begin = start + (-start % align)
            rest = start + length - (begin + numel)
            if rest:
                self.holes.insert(i, (begin + numel, rest))
            return Region(begin, numel, tag)

    def uncarve(self, region):
        with self.lock:
            self.holes.append((region.start, region.numel))
            self.holes.sort()
            merged = []
            for start, length in self.holes:
                if merged and merged[-1][0] + merged[-1][1] == start:
                    merged[-1] = (merged[-1][0], merged[-1][1] + length)
                else:
                    merged.append((start, length))
            self.holes = merged

    @contextlib.contextmanager
    def scratch(self, numel):
        region = self.carve(numel, "scratch")  # clean: uncarved in the finally
        try:
            yield self.view(region)
        finally:
            self.uncarve(region)


class InFlight:
    """Permits for reductions in flight; NCCL gets slow when there are too many."""

    def __init__(self, limit):
        self._sem = threading.BoundedSemaphore(limit)
        self.refused = 0

    def enter(self, timeout):
        ok = self._sem.acquire(timeout=timeout)  # clean: passed to the caller with the true answer
        if not ok:
            self.refused += 1
        return ok

    def leave(self):
        self._sem.release()


class Bucket:
    def __init__(self, name, params):
        self.name = name
        self.params = list(params)
        self.numel = sum(p.numel() for p in self.params)
        self.missing = len(self.params)

    def gather(self, flat):
        torch.cat([p.grad.reshape(-1) for p in self.params], out=flat)

    def scatter(self, flat):
        offset = 0
        for p in self.params:
            p.grad.copy_(flat[offset:offset + p.numel()].view_as(p))
            offset += p.numel()
        self.missing = len(self.params)


class Reducer:
    def __init__(self, buckets, arena, group, limit=4, timeout=60.0):
        self.buckets = {b.name: b for b in buckets}
        self.owner = {p: b for b in buckets for p in b.params}
        self.arena = arena
        self.group = group
        self.timeout = timeout
        self.inflight = InFlight(limit)
        self.accumulating = False
        self.parked = {}
        self.errors = []
        self.norms = arena.carve(len(buckets), "norms")  # clean: kept in the object and uncarved by close()

    def on_ready(self, param):
        bucket = self.owner[param]
        bucket.missing -= 1
        if bucket.missing:
            return
        if self.accumulating:
            self.park(bucket)
        else:
            self.launch(bucket)

    def park(self, bucket):
        held = self.parked.get(bucket.name)
        if held is not None:
            with self.arena.scratch(bucket.numel) as flat:  # clean: the with statement gives it back
                bucket.gather(flat)
                self.arena.view(held).add_(flat)
            return
        region = self.arena.carve(bucket.numel, bucket.name)  # leak: skip_step() clears the table without uncarving
        bucket.gather(self.arena.view(region))
        self.parked[bucket.name] = region

    def unpark_all(self):
        while self.parked:
            name, region = self.parked.popitem()
            self.buckets[name].scatter(self.arena.view(region))
            self.arena.uncarve(region)

    def skip_step(self):
        """The loss was not finite: forget the gradients of this step."""
        self.parked.clear()
        for bucket in self.buckets.values():
            bucket.missing = len(bucket.params)

    def launch(self, bucket):
        if not self.inflight.enter(self.timeout):  # leak: ArenaFull from the carve leaves with the permit taken
            raise ReduceTimeout(bucket.name)
        region = self.arena.carve(bucket.numel, bucket.name)  # clean: near miss, _finish gets it with the future
        flat = self.arena.view(region)
        bucket.gather(flat)
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        work.get_future().add_done_callback(functools.partial(self._finish, bucket, region))

    def _finish(self, bucket, region, fut):
        try:
            fut.value()
            bucket.scatter(self.arena.view(region))
        except RuntimeError as exc:
            self.errors.append((bucket.name, exc))
        finally:
            self.arena.uncarve(region)
            self.inflight.leave()

    def launch_fp16(self, bucket):
        region = self.arena.carve((bucket.numel + 1) // 2, bucket.name)  # leak: on overflow _finish_fp16 returns before it uncarves
        half = self.arena.view(region).view(torch.float16)[:bucket.numel]
        with self.arena.scratch(bucket.numel) as flat:  # clean: the with statement gives it back
            bucket.gather(flat)
            half.copy_(flat)
        work = dist.all_reduce(half, group=self.group, async_op=True)
        work.get_future().add_done_callback(lambda fut: self._finish_fp16(bucket, region, half))

    def _finish_fp16(self, bucket, region, half):
        if not torch.isfinite(half).all():
            log.info("%s overflowed in half precision", bucket.name)
            self.errors.append((bucket.name, "overflow"))
            return
        bucket.scatter(half.float())
        self.arena.uncarve(region)

    def launch_coalesced(self, buckets):
        total = sum(b.numel for b in buckets)
        region = self.arena.carve(total, "coalesced")  # leak: the return without a permit keeps the region
        if not self.inflight.enter(self.timeout):  # clean: left by _finish_many
            log.warning("no permit for %d small buckets", len(buckets))
            return False
        flat = self.arena.view(region)
        for part, bucket in zip(flat.split([b.numel for b in buckets]), buckets):
            bucket.gather(part)
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        work.get_future().add_done_callback(lambda fut: self._finish_many(buckets, region))
        return True

    def _finish_many(self, buckets, region):
        flat = self.arena.view(region)
        for part, bucket in zip(flat.split([b.numel for b in buckets]), buckets):
            bucket.scatter(part)
        self.arena.uncarve(region)
        self.inflight.leave()

    def reduce_hierarchical(self, bucket, local_group, leaders):
        inner = self.arena.carve(bucket.numel, bucket.name)  # clean: near miss, uncarved when the second carve fails and in the finally
        try:
            outer = self.arena.carve_aligned(bucket.numel, 256, bucket.name)  # clean: uncarved in the finally
        except ArenaFull:
            self.arena.uncarve(inner)
            raise
        try:
            bucket.gather(self.arena.view(inner))
            dist.reduce(self.arena.view(inner), dst=0, group=local_group)
            self.arena.view(outer).copy_(self.arena.view(inner))
            dist.all_reduce(self.arena.view(outer), group=leaders)
            bucket.scatter(self.arena.view(outer))
        finally:
            self.arena.uncarve(outer)
            self.arena.uncarve(inner)

    def idle(self):
        if not self.inflight.enter(0):  # clean: left at once
            return False
        self.inflight.leave()
        return True

    def close(self):
        self.unpark_all()
        self.arena.uncarve(self.norms)
        self.norms = None
