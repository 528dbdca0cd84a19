"""Gradient bucketing with flat communication buffers borrowed from a size-classed pool."""

import logging
import math
import threading
from collections import defaultdict
from typing import Callable, List, Optional

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)


class FlatBuffer:
    def __init__(self, numel, dtype, device):
        self.data = torch.zeros(numel, dtype=dtype, device=device)
        self.numel = numel
        self.dtype = dtype


class CommBufferPool:
    """Flat buffers by dtype.  Sizes are rounded up to a power of two, so that buckets of like size share."""

    def __init__(self, device, limit_bytes):
        self.device = device
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._free = defaultdict(list)
        self._bytes = 0

    @staticmethod
    def size_class(numel):
        return 1 << max(10, math.ceil(math.log2(max(1, numel))))

    def get(self, numel, dtype) -> FlatBuffer:
        want = self.size_class(numel)
        with self._lock:
            bin_ = self._free[(dtype, want)]
            if bin_:
                return bin_.pop()  # clean: returned to the caller
            self._bytes += want * torch.finfo(dtype).bits // 8
            if self._bytes > self.limit_bytes:
                log.warning("communication buffers use %.1f MiB", self._bytes / 2**20)
        return FlatBuffer(want, dtype, self.device)  # clean: returned to the caller

    def get_fitting(self, numel, dtype, slack=4) -> Optional[FlatBuffer]:
        """Any free buffer between numel and slack * numel, without allocating."""
        with self._lock:
            for (dt, size), bin_ in self._free.items():
                if dt is not dtype or not bin_:
                    continue
                candidate = bin_.pop()  # leak: a candidate outside the bounds is dropped when the loop goes on to the next bin
                if numel <= candidate.numel <= slack * numel:
                    return candidate
        return None

    def put(self, buf: FlatBuffer):
        with self._lock:
            self._free[(buf.dtype, buf.numel)].append(buf)


class Bucket:
    def __init__(self, index: int, params: List[torch.nn.Parameter]):
        self.index = index
        self.params = params
        self.numel = sum(p.numel() for p in params)
        self.dtype = params[0].dtype
        self.ready = 0
        self.flat: Optional[FlatBuffer] = None
        self.residual: Optional[FlatBuffer] = None

    def copy_in(self):
        pos = 0
        for p in self.params:
            self.flat.data[pos:pos + p.numel()].copy_(p.grad.view(-1))
            pos += p.numel()

    def copy_out(self, source, scale):
        pos = 0
        for p in self.params:
            p.grad.view(-1).copy_(source.data[pos:pos + p.numel()]).mul_(scale)
            pos += p.numel()


class GradReducer:
    def __init__(self, params, pool: CommBufferPool, bucket_numel: int, *, compress: bool = False, group=None):
        self.pool = pool
        self.group = group
        self.world = dist.get_world_size(group)
        self.compress = compress
        self.buckets: List[Bucket] = []
        self._where = {}
        self._pending = []
        self._norms = []
        self._hooks = []
        self._sync = True
        self._build(list(params), bucket_numel)

    def _build(self, params, bucket_numel):
        cur, size = [], 0
        for p in reversed(params):
            cur.append(p)
            size += p.numel()
            if size >= bucket_numel:
                self.buckets.append(Bucket(len(self.buckets), cur))
                cur, size = [], 0
        if cur:
            self.buckets.append(Bucket(len(self.buckets), cur))
        for b in self.buckets:
            if self.compress:
                b.residual = self.pool.get(b.numel, torch.float32)  # leak: teardown() returns residuals only when world is over one
                b.residual.data.zero_()
            for p in b.params:
                self._where[p] = b
                self._hooks.append(p.register_post_accumulate_grad_hook(self._on_grad))

    # ---- backward

    def _on_grad(self, p):
        if not self._sync:
            return
        b = self._where[p]
        if b.flat is None:
            b.flat = self.pool.get(b.numel, b.dtype)  # clean: near miss, taken once a bucket and moved to _pending or put back by reset()
        b.ready += 1
        if b.ready == len(b.params):
            self._launch(b)

    def _launch(self, b):
        b.copy_in()
        if self.compress:
            b.flat.data[:b.numel].add_(b.residual.data[:b.numel])
            self._launch_compressed(b)
            return
        work = dist.all_reduce(b.flat.data[:b.numel], group=self.group, async_op=True)
        self._pending.append((b, b.flat, work))
        b.flat, b.ready = None, 0

    def _launch_compressed(self, b):
        half = self.pool.get(b.numel, torch.bfloat16)  # leak: the callback puts it back only when the reduction succeeded
        half.data[:b.numel].copy_(b.flat.data[:b.numel])
        b.residual.data[:b.numel].copy_(b.flat.data[:b.numel] - half.data[:b.numel].float())
        self.pool.put(b.flat)
        b.flat, b.ready = None, 0
        fut = dist.all_reduce(half.data[:b.numel], group=self.group, async_op=True).get_future()

        def finished(f):
            try:
                f.value()
            except RuntimeError as exc:
                log.error("bucket %d: %s", b.index, exc)
                return
            b.copy_out(half, 1.0 / self.world)
            self.pool.put(half)

        fut.add_done_callback(finished)
        self._pending.append((b, None, fut))

    # ---- after backward

    def finalize(self):
        """Wait for all reductions and put averaged gradients in place."""
        while self._pending:
            b, flat, work = self._pending.pop(0)
            work.wait()
            if flat is None:
                continue
            try:
                b.copy_out(flat, 1.0 / self.world)
            finally:
                self.pool.put(flat)

    def check_overflow(self) -> bool:
        """Sum of squares of all gradients, reduced over ranks; the scratch scalars live until norm() reads them."""
        for b in self.buckets:
            s = self.pool.get(1, torch.float32)  # leak: with an overflow, norm() clears the list without putting the scalars back
            s.data[0] = sum(float(p.grad.float().pow(2).sum()) for p in b.params if p.grad is not None)
            self._norms.append(s)
        return all(math.isfinite(float(s.data[0])) for s in self._norms)

    def norm(self, overflow: bool) -> float:
        if overflow:
            self._norms.clear()
            return float("inf")
        total = 0.0
        while self._norms:
            s = self._norms.pop()
            dist.all_reduce(s.data[:1], group=self.group)
            total += float(s.data[0])
            self.pool.put(s)
        return math.sqrt(total)

    def reset(self):
        for b in self.buckets:
            if b.flat is not None:
                self.pool.put(b.flat)
                b.flat = None
            b.ready = 0

    def teardown(self):
        self.finalize()
        self.reset()
        for h in self._hooks:
            h.remove()
        if self.world > 1 and self.compress:
            for b in self.buckets:
                self.pool.put(b.residual)
                b.residual = None


def broadcast_state(pool: CommBufferPool, tensors, src: int, on_progress: Callable[[int], bool], group=None) -> int:
    """Send tensors from src, one at a time; on_progress returns False to stop."""
    sent = 0
    for t in tensors:
        buf = pool.get_fitting(t.numel(), t.dtype)  # clean: near miss, None falls through to get() and both are put below
        if buf is None:
            buf = pool.get(t.numel(), t.dtype)  # clean: put in the finally
        try:
            view = buf.data[:t.numel()]
            view.copy_(t.view(-1))
            dist.broadcast(view, src, group=group)
            t.view(-1).copy_(view)
            sent += 1
            if not on_progress(sent):
                break
        finally:
            pool.put(buf)
    return sent


def check_length(t, announced):
    if t.numel() != announced:
        raise ValueError("announced %d elements, have %d" % (announced, t.numel()))


def gather_ragged(pool: CommBufferPool, t: torch.Tensor, lengths: List[int], group=None) -> torch.Tensor:
    width = max(lengths)
    mine = pool.get(width, t.dtype)  # leak: check_length() raises for a length that was announced wrong, before anything is put
    check_length(t, lengths[dist.get_rank(group)])
    mine.data[:t.numel()].copy_(t.view(-1))
    parts = [pool.get(width, t.dtype) for _ in lengths]  # clean: all put below
    dist.all_gather([p.data[:width] for p in parts], mine.data[:width], group=group)
    out = torch.cat([p.data[:n].clone() for p, n in zip(parts, lengths)])
    for p in parts:
        pool.put(p)
    pool.put(mine)
    return out
