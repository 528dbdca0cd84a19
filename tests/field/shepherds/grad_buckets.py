"""Gradient bucketing for data parallel training.

Parameters are packed into flat buckets; as soon as all gradients of a bucket are there it is reduced
asynchronously. Flat memory comes from a FlatPool, and each running collective holds a credit so that the
network is not flooded.
"""
import collections
import functools
import logging
import math
import threading

import torch
import torch.distributed as dist

_log = logging.getLogger("ddp.bucket")

Piece = collections.namedtuple("Piece", "param offset numel")

class CommFailed(RuntimeError):
    pass

class NonFinite(ArithmeticError):
    """A gradient holds inf or nan."""

class FlatPool:
    """Flat tensors, kept by size."""

    def __init__(self, device, dtype):
        self.device = device
        self.dtype = dtype
        self._shelves = collections.defaultdict(list)
        self.allocated = 0

    def rent(self, numel):
        size = 1 << math.ceil(math.log2(max(numel, 1024)))
        shelf = self._shelves[size]
        if shelf:
            flat = shelf.pop()  # clean: returned to the caller
        else:
            flat = torch.empty(size, device=self.device, dtype=self.dtype)
            self.allocated += size
        return flat

    def give(self, flat):
        self._shelves[flat.numel()].append(flat)

    def clear(self):
        self._shelves.clear()
        self.allocated = 0

class Credits:
    def __init__(self, n):
        self._sem = threading.Semaphore(n)
        self.waits = 0

    def take(self):
        if not self._sem.acquire(blocking=False):  # clean: this is the credit, back() releases it
            self.waits += 1
            self._sem.acquire()  # clean: likewise

    def try_take(self):
        return self._sem.acquire(blocking=False)  # clean: the answer goes to the caller, who calls back()

    def back(self):
        self._sem.release()

class Bucket:
    def __init__(self, index, params):
        self.index = index
        self.pieces = []
        offset = 0
        for p in params:
            self.pieces.append(Piece(p, offset, p.numel()))
            offset += p.numel()
        self.numel = offset
        self.ready = 0
        self.flat = None
        self.work = None

    def pack(self):
        for piece in self.pieces:
            view = self.flat[piece.offset:piece.offset + piece.numel]
            if piece.param.grad is None:
                view.zero_()
            else:
                view.copy_(piece.param.grad.reshape(-1))

    def unpack(self, scale):
        for piece in self.pieces:
            view = self.flat[piece.offset:piece.offset + piece.numel]
            piece.param.grad = (view * scale).view_as(piece.param)

class Reducer:
    def __init__(self, params, bucket_numel=1 << 22, credits=4, group=None):
        params = [p for p in params if p.requires_grad]
        self.pool = FlatPool(params[0].device, params[0].dtype)
        self.credits = Credits(credits)
        self.group = group
        self.world = dist.get_world_size(group)
        self.buckets = self._split(params, bucket_numel)
        self.enabled = True
        self._hooks = []
        for bucket in self.buckets:
            for piece in bucket.pieces:
                hook = functools.partial(self._on_grad, bucket)
                self._hooks.append(piece.param.register_post_accumulate_grad_hook(hook))  # clean: the list is removed in detach()

    @staticmethod
    def _split(params, limit):
        out, cur, n = [], [], 0
        for p in reversed(params):
            if cur and n + p.numel() > limit:
                out.append(Bucket(len(out), cur))
                cur, n = [], 0
            cur.append(p)
            n += p.numel()
        if cur:
            out.append(Bucket(len(out), cur))
        return out

    def _on_grad(self, bucket, _param):
        if not self.enabled:
            return
        bucket.ready += 1
        if bucket.ready == len(bucket.pieces):
            self._launch(bucket)

    def _launch(self, bucket):
        bucket.flat = self.pool.rent(bucket.numel)  # clean: near miss, the bucket owns it until finish() or discard() gives it
        bucket.pack()
        self.credits.take()  # leak: discard() clears bucket.work without waiting and without back()
        bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)

    def finish(self):
        """Wait for all buckets; call between backward() and step()."""
        for bucket in self.buckets:
            if bucket.flat is None:
                continue
            bucket.work.wait()
            self.credits.back()
            bucket.unpack(1.0 / self.world)
            self._clear(bucket)

    def _clear(self, bucket):
        self.pool.give(bucket.flat)
        bucket.flat = bucket.work = None
        bucket.ready = 0

    def discard(self):
        """Forget this step's gradients, after an overflow."""
        for bucket in self.buckets:
            if bucket.flat is not None:
                self._clear(bucket)

    def detach(self):
        for h in self._hooks:
            h.remove()
        self._hooks = []

    def global_norm(self):
        total = 0.0
        for bucket in self.buckets:
            flat = self.pool.rent(bucket.numel)  # leak: NonFinite is raised with the flat tensor of that bucket rented
            for piece in bucket.pieces:
                if piece.param.grad is not None:
                    flat[piece.offset:piece.offset + piece.numel] = piece.param.grad.reshape(-1)
                else:
                    flat[piece.offset:piece.offset + piece.numel] = 0
            sq = float(flat[:bucket.numel].float().pow(2).sum())
            if not math.isfinite(sq):
                raise NonFinite(f"bucket {bucket.index}")
            total += sq
            self.pool.give(flat)
        return math.sqrt(total)

    def clip(self, max_norm):
        try:
            norm = self.global_norm()
        except NonFinite as exc:
            _log.warning("step dropped: %s", exc)
            self.discard()
            return None
        if norm > max_norm:
            for bucket in self.buckets:
                for piece in bucket.pieces:
                    if piece.param.grad is not None:
                        piece.param.grad.mul_(max_norm / norm)
        return norm

    def check_sync(self, tolerance=1e-6):
        """Compare a checksum of the weights over all ranks. Only when there is a credit to spare."""
        if not self.credits.try_take():  # leak: ranks that differ return False before back()
            return True
        sums = torch.stack([p.param.data.double().sum() for b in self.buckets for p in b.pieces])
        low, high = sums.clone(), sums.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN, group=self.group)
        dist.all_reduce(high, dist.ReduceOp.MAX, group=self.group)
        if float((high - low).abs().max()) > tolerance:
            _log.error("ranks have drifted apart")
            return False
        self.credits.back()
        return True

class GradAccumulator:
    """Sums gradients of micro-batches in flat buffers of a wider type."""

    def __init__(self, reducer):
        self.reducer = reducer
        self.pool = FlatPool(reducer.pool.device, torch.float32)
        self.sums = {}
        self.count = 0

    def add(self):
        for bucket in self.reducer.buckets:
            acc = self.sums.get(bucket.index)
            if acc is None:
                acc = self.pool.rent(bucket.numel)  # leak: reset() of a partial accumulation empties the dict without give()
                acc.zero_()
                self.sums[bucket.index] = acc
            for piece in bucket.pieces:
                if piece.param.grad is not None:
                    acc[piece.offset:piece.offset + piece.numel] += piece.param.grad.reshape(-1).float()
        self.count += 1

    def apply(self):
        for bucket in self.reducer.buckets:
            acc = self.sums.pop(bucket.index, None)
            if acc is None:
                continue
            for piece in bucket.pieces:
                mean = acc[piece.offset:piece.offset + piece.numel] / self.count
                piece.param.grad = mean.view_as(piece.param).to(piece.param.dtype)
            self.pool.give(acc)
        self.count = 0

    def reset(self):
        self.sums = {}
        self.count = 0

def time_reduce(reducer, clock, rounds=5):
    """Seconds for an all-reduce of each bucket size, for choosing bucket_numel."""
    result = {}
    for bucket in reducer.buckets:
        if bucket.numel in result:
            continue
        flat = reducer.pool.rent(bucket.numel)  # leak: CommFailed that is handled below breaks out before give()
        try:
            t0 = clock()
            for _ in range(rounds):
                if not dist.is_initialized():
                    raise CommFailed("process group is gone")
                dist.all_reduce(flat, group=reducer.group)
            result[bucket.numel] = (clock() - t0) / rounds
        except CommFailed as exc:
            _log.warning("timing stopped: %s", exc)
            break
        reducer.pool.give(flat)
    return result
