"""Gradient bucketing and overlapped all-reduce.

Gradients are packed into fixed flat buffers.  A buffer index is lent by
BucketStore while its reduction is open; CommCredits bounds how many
collectives are in flight at once.
"""
import heapq
import logging
import threading
from typing import Dict, List, Optional

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)


class BucketStore:
    def __init__(self, count: int, numel: int, device):
        self.flat = [torch.zeros(numel, device=device) for _ in range(count)]
        self.numel = numel
        self._free = list(range(count))
        self._quarantine: List[int] = []
        heapq.heapify(self._free)

    def lend(self) -> int:
        if not self._free:
            raise RuntimeError("no bucket is free")
        return heapq.heappop(self._free)  # clean: returned to the caller

    def lend_finite(self) -> Optional[int]:
        """A bucket whose memory holds no stale NaN."""
        while self._free:
            idx = heapq.heappop(self._free)  # leak: an index with NaN is popped and forgotten
            if torch.isfinite(self.flat[idx]).all():
                return idx
            log.warning("bucket %d has stale values", idx)
        return None

    def lend_zeroed(self) -> Optional[int]:
        while self._free:
            idx = heapq.heappop(self._free)  # clean: near miss, bad ones go to the quarantine that scrub() empties
            if self.flat[idx].data_ptr() % 512 == 0:
                self.flat[idx].zero_()
                return idx
            self._quarantine.append(idx)
        return None

    def scrub(self) -> None:
        for idx in self._quarantine:
            self.flat[idx] = torch.zeros(self.numel, device=self.flat[idx].device)
            heapq.heappush(self._free, idx)
        self._quarantine.clear()

    def restore(self, idx: int) -> None:
        heapq.heappush(self._free, idx)


class CommCredits:
    def __init__(self, n: int):
        self._sem = threading.BoundedSemaphore(n)

    def spend(self, timeout: float = 30.0) -> bool:
        return self._sem.acquire(timeout=timeout)  # clean: the caller earns it back

    def earn(self) -> None:
        self._sem.release()

    def __enter__(self):
        self._sem.acquire()  # clean: released in __exit__
        return self

    def __exit__(self, *exc):
        self._sem.release()
        return False


class Reducer:
    def __init__(self, params, store: BucketStore, credits: CommCredits, group=None):
        self.params = list(params)
        self.store = store
        self.credits = credits
        self.group = group
        self.current: Optional[int] = None
        self.fill = 0
        self.dtype = None
        self.members: Dict[int, list] = {}
        self.inflight: Dict[int, dist.Work] = {}

    # -- packing ---------------------------------------------------------
    def add(self, p: torch.nn.Parameter) -> None:
        n = p.grad.numel()
        if n > self.store.numel:
            self._reduce_alone(p)
            return
        if self.current is not None and self.fill + n > self.store.numel:
            self.launch()
        if self.current is None or p.grad.dtype != self.dtype:
            self.current = self.store.lend()  # leak: a dtype change rebinds current while the old bucket is open
            self.dtype = p.grad.dtype
            self.fill = 0
            self.members[self.current] = []
        self.store.flat[self.current][self.fill : self.fill + n].copy_(p.grad.view(-1))
        self.members[self.current].append((p, self.fill, n))
        self.fill += n

    def launch(self) -> None:
        idx, self.current = self.current, None
        if not self.credits.spend():  # clean: earned back in finish()
            self.unpack(idx)
            self.store.restore(idx)
            raise TimeoutError("no communication credit")
        self.inflight[idx] = dist.all_reduce(self.store.flat[idx], group=self.group, async_op=True)

    def finish(self) -> None:
        if self.current is not None:
            self.launch()
        for idx in list(self.inflight):
            self.inflight.pop(idx).wait()
            self.credits.earn()
            self.unpack(idx)
            self.store.restore(idx)

    def unpack(self, idx: int) -> None:
        for p, lo, n in self.members.pop(idx, []):
            p.grad.view(-1).copy_(self.store.flat[idx][lo : lo + n])

    # -- one-off reductions ------------------------------------------------
    def _reduce_alone(self, p) -> None:
        if not self.credits.spend():  # leak: the credit is kept when the group has one rank
            raise TimeoutError("no communication credit")
        if dist.get_world_size(self.group) == 1:
            return
        dist.all_reduce(p.grad, group=self.group)
        self.credits.earn()

    def reduce_norm(self) -> float:
        with self.credits:
            total = torch.stack([p.grad.float().pow(2).sum() for p in self.params]).sum()
            dist.all_reduce(total, group=self.group)
        return float(total.sqrt())

    def reduce_scalars(self, values: List[float], attempts: int = 3) -> Optional[torch.Tensor]:
        for attempt in range(attempts):
            idx = self.store.lend()  # leak: an attempt that times out goes round without restore
            flat = self.store.flat[idx]
            flat[: len(values)] = torch.tensor(values)
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            if not self._poll(work):
                log.warning("scalar reduce attempt %d timed out", attempt)
                continue
            out = flat[: len(values)].clone()
            self.store.restore(idx)
            return out
        return None

    def reduce_flags(self, flags: torch.Tensor, attempts: int = 3) -> bool:
        idx = self.store.lend()  # clean: near miss, taken once before the retries and restored behind them
        flat = self.store.flat[idx]
        ok = False
        for _ in range(attempts):
            flat[: flags.numel()].copy_(flags.view(-1))
            if self._poll(dist.all_reduce(flat, group=self.group, async_op=True)):
                ok = True
                break
        if ok:
            flags.view(-1).copy_(flat[: flags.numel()])
        self.store.restore(idx)
        return ok

    def broadcast_async(self, t: torch.Tensor, src: int) -> None:
        idx = self.store.lend()  # clean: near miss, restored by the future's callback
        flat = self.store.flat[idx]
        flat[: t.numel()].copy_(t.view(-1))
        work = dist.broadcast(flat, src, group=self.group, async_op=True)

        def done(_fut):
            t.view(-1).copy_(flat[: t.numel()])
            self.store.restore(idx)

        work.get_future().add_done_callback(done)

    def gather_async(self, t: torch.Tensor, dst: int, on_done=None) -> dist.Work:
        idx = self.store.lend()  # leak: without on_done no callback is registered and nobody restores
        flat = self.store.flat[idx]
        flat[: t.numel()].copy_(t.view(-1))
        work = dist.reduce(flat, dst, group=self.group, async_op=True)
        if on_done is not None:
            def done(fut):
                on_done(flat[: t.numel()].clone())
                self.store.restore(idx)

            work.get_future().add_done_callback(done)
        return work

    @staticmethod
    def _poll(work: dist.Work, timeout: float = 5.0) -> bool:
        evt = threading.Event()
        work.get_future().add_done_callback(lambda _: evt.set())
        return evt.wait(timeout)
