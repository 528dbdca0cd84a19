"""Gradient bucketing with overlapped reduction and recycled flat buffers."""
import torch
import torch.distributed as dist


class FlatStore:
    """Stack of flat gradient buffers per dtype."""

    def __init__(self, numel):
        self.numel = numel
        self._stacks = {}
        self.lent = 0

    def checkout(self, dtype):
        stack = self._stacks.setdefault(dtype, [])
        self.lent += 1
        if not stack:
            return torch.zeros(self.numel, dtype=dtype)
        return stack.pop().zero_()  # clean: handed to the caller

    def checkin(self, flat):
        self.lent -= 1
        self._stacks.setdefault(flat.dtype, []).append(flat)

    def retype(self, src, dst):
        """Turn the spare buffers of one dtype into another."""
        stack = self._stacks.get(src, [])
        while stack:
            flat = stack.pop()  # clean: near miss, its converted form joins the other stack, conversion is the purpose
            self._stacks.setdefault(dst, []).append(flat.to(dst))

    def largest_abs(self, dtype):
        stack = self._stacks.get(dtype, [])
        flat = stack.pop() if stack else None  # leak: a buffer is taken off the stack and only read
        return 0.0 if flat is None else float(flat.abs().max())


class PendingReduce:
    def __init__(self, flat, work, params):
        self.flat = flat
        self.work = work
        self.params = params


class BucketReducer:
    def __init__(self, params, store, group=None, bucket_numel=1 << 20):
        self.params = [p for p in params if p.requires_grad]
        self.store = store
        self.group = group
        self.bucket_numel = bucket_numel
        self.pending = []
        self.scratch = None

    def _pack(self, params):
        flat = self.store.checkout(params[0].dtype)  # clean: handed to the caller
        at = 0
        for p in params:
            n = p.numel()
            if p.grad is not None:
                flat[at : at + n].copy_(p.grad.view(-1))
            at += n
        return flat

    def launch(self, params):
        flat = self._pack(params)  # clean: near miss, moved into a pending reduce that drain checks in
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        self.pending.append(PendingReduce(flat, work, params))

    def launch_dense(self, params):
        flat = self._pack(params)  # leak: a bucket of zeros returns early without checkin
        if not flat.any():
            return None
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        self.pending.append(PendingReduce(flat, work, params))
        return work

    def drain(self):
        while self.pending:
            item = self.pending.pop()
            item.work.wait()
            self._unpack(item.flat, item.params)
            self.store.checkin(item.flat)

    def _unpack(self, flat, params):
        at = 0
        for p in params:
            n = p.numel()
            if p.grad is not None:
                p.grad.view(-1).copy_(flat[at : at + n])
            at += n

    def reduce_now(self, params, average=True):
        flat = self._pack(params)  # clean: near miss, the averaging is in place so the same buffer is checked in
        dist.all_reduce(flat, group=self.group)
        if average:
            flat.div_(dist.get_world_size(self.group))
        self._unpack(flat, params)
        self.store.checkin(flat)

    def reduce_compressed(self, params):
        flat = self._pack(params)  # leak: rebound to its half precision copy, the checkin gives back the copy
        flat = flat.to(torch.bfloat16, copy=True)
        dist.all_reduce(flat, group=self.group)
        self._unpack(flat, params)
        self.store.checkin(flat)

    def norm(self, params):
        return self._pack(params).norm()  # leak: the packed buffer is dropped after the norm

    def ensure_scratch(self, dtype):
        if self.scratch is not None and self.scratch.dtype == dtype:
            return self.scratch
        if self.scratch is not None:
            self.store.checkin(self.scratch)
        self.scratch = self.store.checkout(dtype)  # clean: near miss, the former scratch was checked in and close drops this one
        return self.scratch

    def groups(self):
        cur, size = [], 0
        for p in self.params:
            if cur and size + p.numel() > self.bucket_numel:
                yield cur
                cur, size = [], 0
            cur.append(p)
            size += p.numel()
        if cur:
            yield cur

    def close(self):
        self.drain()
        if self.scratch is not None:
            self.store.checkin(self.scratch)
            self.scratch = None


class HookedReducer(BucketReducer):
    """Launches a bucket as soon as the last of its gradients has arrived."""

    def __init__(self, *args, **kw):
        super().__init__(*args, **kw)
        self.mirror = {}

    def snapshot(self, tag, params):
        if tag in self.mirror:
            self.store.checkin(self.mirror.pop(tag))
        self.mirror[tag] = self._pack(params)  # leak: close of this class does not check the mirrors in

    def drift(self, tag, params):
        if tag not in self.mirror:
            return None
        now = self._pack(params)  # clean: checked in after the difference
        delta = (now - self.mirror[tag]).norm()
        self.store.checkin(now)
        return delta

    def close(self):
        super().close()
        self.mirror.clear()
