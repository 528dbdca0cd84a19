"""Gradient buckets and the flat buffers that back their all-reduce."""
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist


class FlatBufferPool:
    def __init__(self, numel, dtype, device, limit):
        self._numel = numel
        self._dtype = dtype
        self._device = device
        self._limit = limit
        self._made = 0
        self._idle = []
        self._lock = threading.Lock()

    def rent(self):
        with self._lock:
            if self._idle:
                return self._idle.pop()  # clean: the caller has it
            if self._made >= self._limit:
                return None
            self._made += 1
        return torch.empty(self._numel, dtype=self._dtype, device=self._device)

    def unrent(self, buf):
        with self._lock:
            self._idle.append(buf)

    def trim(self, keep):
        dropped = 0
        with self._lock:
            while len(self._idle) > keep:
                buf = self._idle.pop()  # clean: near miss, trimming is meant to drop it and the count follows
                self._made -= 1
                dropped += buf.nbytes
        return dropped

    def shrink_dtype(self, dtype):
        with self._lock:
            kept = []
            while self._idle:
                buf = self._idle.pop()  # leak: buffers of another dtype are dropped while _made still counts them
                if buf.dtype == dtype:
                    kept.append(buf)
            self._idle = kept


class Bucket:
    def __init__(self, index, params):
        self.index = index
        self.params = params
        self.pending = len(params)
        self.flat = None
        self.work = None

    def pack(self, flat):
        offset = 0
        for p in self.params:
            n = p.grad.numel()
            flat[offset : offset + n].copy_(p.grad.view(-1))
            offset += n
        return offset

    def unpack(self, flat):
        offset = 0
        for p in self.params:
            n = p.grad.numel()
            p.grad.copy_(flat[offset : offset + n].view_as(p.grad))
            offset += n


class Reducer:
    def __init__(self, pool, group, buckets):
        self._pool = pool
        self._group = group
        self._buckets = buckets
        self._launched = []
        self._residual = {}

    def launch(self, bucket):
        flat = self._pool.rent()  # clean: near miss, travels inside the bucket to finish
        if flat is None:
            self._reduce_inline(bucket)
            return
        bucket.pack(flat)
        bucket.flat = flat
        bucket.work = dist.all_reduce(flat, group=self._group, async_op=True)
        self._launched.append(bucket)

    def finish(self):
        for bucket in self._launched:
            bucket.work.wait()
            bucket.unpack(bucket.flat)
            self._pool.unrent(bucket.flat)
            bucket.flat = bucket.work = None
        self._launched.clear()

    def _reduce_inline(self, bucket):
        for p in bucket.params:
            dist.all_reduce(p.grad, group=self._group)

    def launch_compressed(self, bucket, topk):
        flat = self._pool.rent()  # leak: missing when the second buffer cannot be had
        if flat is None:
            return False
        err = self._pool.rent()  # leak: replaces the residual of the previous step
        if err is None:
            return False
        n = bucket.pack(flat)
        err[:n].copy_(flat[:n])
        values, idx = flat[:n].abs().topk(topk)
        err[idx] = 0
        self._residual[bucket.index] = err
        dist.all_reduce(values, group=self._group)
        self._pool.unrent(flat)
        return True

    def norm(self):
        total = 0.0
        for bucket in self._buckets:
            if not bucket.params:
                continue
            flat = self._pool.rent()  # clean: near miss, the continue comes before it and the break after the unrent
            if flat is None:
                break
            total += float(flat[: bucket.pack(flat)].pow(2).sum())
            self._pool.unrent(flat)
            if total != total:
                break
        return total ** 0.5

    def clip(self, limit):
        flat = self._pool.rent()  # leak: nothing is given back when no bucket exceeds the limit
        if flat is None:
            return 0
        clipped = 0
        for bucket in self._buckets:
            n = bucket.pack(flat)
            norm = float(flat[:n].norm())
            if norm > limit:
                flat[:n].mul_(limit / norm)
                bucket.unpack(flat)
                clipped += 1
        if clipped:
            self._pool.unrent(flat)
        return clipped

    def close(self):
        self.finish()
        for err in self._residual.values():
            self._pool.unrent(err)
        self._residual.clear()


class BackgroundReducer:
    def __init__(self, pool, workers=2):
        self._pool = pool
        self._exec = ThreadPoolExecutor(workers)

    def submit(self, bucket, group):
        flat = self._pool.rent()  # clean: near miss, the done callback gives it back
        if flat is None:
            return None
        bucket.pack(flat)
        fut = self._exec.submit(dist.all_reduce, flat, group=group)
        fut.add_done_callback(lambda _f, held=flat: self._pool.unrent(held))
        return fut
