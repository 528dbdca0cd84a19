# Gradient bucketing with recycled flat workspaces.
#
# All-reduce wants few large tensors.  Gradients are packed into flat
# workspaces that come from an arena and go back once they are unpacked.

import collections
import logging
import math

import torch
import torch.distributed as dist

_logger = logging.getLogger("train.grads")


class ArenaFull(RuntimeError):
    pass


class NonFiniteGradient(ArithmeticError):
    pass


class WorkspaceArena:
    """Recycles flat tensors by power-of-two capacity."""

    def __init__(self, budget, device="cpu", dtype=torch.float32):
        self.budget = budget
        self.device = device
        self.dtype = dtype
        self._used = 0
        self._bins = collections.defaultdict(list)

    @staticmethod
    def _bin(numel):
        return 1 << max(10, math.ceil(math.log2(max(1, numel))))

    def rent(self, numel):
        cap = self._bin(numel)
        if self._bins[cap]:
            return self._bins[cap].pop()  # clean: returned
        if self._used + cap > self.budget:
            raise ArenaFull(f"{numel} elements over a budget of {self.budget}")
        self._used += cap
        return torch.empty(cap, device=self.device, dtype=self.dtype)

    def rent_zeroed(self, numel):
        ws = self.rent(numel)  # clean: zeroed in place and returned
        ws.zero_()
        return ws

    def rent_as(self, other):
        """A workspace for ``other``, in its dtype."""
        ws = self.rent(other.numel())  # leak: for a foreign dtype the converted copy is returned, the workspace itself is lost
        if ws.dtype != other.dtype:
            ws = ws.to(other.dtype)
        return ws

    def maybe_rent(self, numel):
        try:
            return self.rent(numel)  # clean: passed on
        except ArenaFull:
            return None

    def give(self, ws):
        self._bins[ws.numel()].append(ws)


def pack(tensors, ws):
    offset = 0
    for t in tensors:
        n = t.numel()
        ws[offset : offset + n].copy_(t.reshape(-1))
        offset += n
    return offset


def unpack(ws, tensors):
    offset = 0
    for t in tensors:
        n = t.numel()
        t.copy_(ws[offset : offset + n].view_as(t))
        offset += n


def total(tensors):
    return sum(t.numel() for t in tensors)


def flatten(arena, tensors):
    """Packed copy of ``tensors``; the workspace belongs to the caller."""
    ws = arena.rent(total(tensors))  # clean: ownership goes to the caller
    pack(tensors, ws)
    return ws


def check_finite(ws, used):
    if not torch.isfinite(ws[:used]).all():
        raise NonFiniteGradient()


class BucketReducer:
    def __init__(self, arena, params, bucket_numel=1 << 22, group=None, average=True):
        self.arena = arena
        self.params = [p for p in params if p.requires_grad]
        self.bucket_numel = bucket_numel
        self.group = group
        self.average = average
        self._pending = []
        self._accum = None
        self.skipped = 0

    def _buckets(self):
        bucket, size = [], 0
        for p in reversed(self.params):
            if p.grad is None:
                continue
            if bucket and size + p.grad.numel() > self.bucket_numel:
                yield bucket
                bucket, size = [], 0
            bucket.append(p.grad)
            size += p.grad.numel()
        if bucket:
            yield bucket

    # -- synchronous -----------------------------------------------------
    def reduce(self):
        for bucket in self._buckets():
            ws = flatten(self.arena, bucket)  # clean: finally
            try:
                dist.all_reduce(ws, group=self.group)
                if self.average:
                    ws.div_(dist.get_world_size(self.group))
                unpack(ws, bucket)
            finally:
                self.arena.give(ws)

    def reduce_half(self):
        """Reduce in bfloat16; the packed fp32 copy is only a stepping stone."""
        for bucket in self._buckets():
            ws = flatten(self.arena, bucket)  # leak: the name is bound to the bf16 copy and that is never in the arena
            ws = ws.to(torch.bfloat16)
            dist.all_reduce(ws, group=self.group)
            unpack(ws, bucket)

    def reduce_scaled(self, scale):
        for bucket in self._buckets():
            ws = flatten(self.arena, bucket)  # clean: mul_ is in place, so the name still means the workspace
            ws = ws.mul_(scale)
            dist.all_reduce(ws, group=self.group)
            unpack(ws, bucket)
            self.arena.give(ws)

    def reduce_checked(self):
        """Skip the step on a non-finite gradient; True if it was applied."""
        for bucket in self._buckets():
            ws = flatten(self.arena, bucket)  # leak: check_finite raises and the handler returns without give
            used = total(bucket)
            dist.all_reduce(ws, group=self.group)
            try:
                check_finite(ws, used)
            except NonFiniteGradient:
                self.skipped += 1
                return False
            unpack(ws, bucket)
            self.arena.give(ws)
        return True

    # -- overlapped ------------------------------------------------------
    def launch(self):
        for bucket in self._buckets():
            ws = flatten(self.arena, bucket)  # clean: waits in _pending with its handle, collect gives it back
            handle = dist.all_reduce(ws, group=self.group, async_op=True)
            self._pending.append((handle, ws, bucket))

    def collect(self):
        while self._pending:
            handle, ws, bucket = self._pending.pop()
            handle.wait()
            unpack(ws, bucket)
            self.arena.give(ws)

    def abandon(self):
        pending, self._pending = self._pending, []
        for handle, ws, _ in pending:
            handle.wait()
            self.arena.give(ws)

    # -- accumulation ----------------------------------------------------
    def accumulate(self):
        grads = [p.grad for p in self.params if p.grad is not None]
        if not grads:
            return
        need = total(grads)
        if self._accum is None:
            self._accum = self.arena.rent_zeroed(need)  # clean: stays in the field until flush
        ws = flatten(self.arena, grads)  # clean: added and given back on the last line
        self._accum[:need].add_(ws[:need])
        self.arena.give(ws)

    def flush(self):
        if self._accum is None:
            return
        grads = [p.grad for p in self.params if p.grad is not None]
        unpack(self._accum, grads)
        self.arena.give(self._accum)
        self._accum = None

    def resize_accum(self, numel):
        bigger = self.arena.rent_zeroed(numel)  # clean: becomes the field's workspace
        if self._accum is not None:
            n = min(numel, self._accum.numel())
            bigger[:n].copy_(self._accum[:n])
            self.arena.give(self._accum)
        self._accum = bigger

    def reset_accum(self):
        """Start over with zeros, whether or not a step is under way."""
        fresh = self.arena.rent_zeroed(total(self.params))  # leak: with an accumulation under way only that one is zeroed
        if self._accum is None:
            self._accum = fresh
        else:
            self._accum.zero_()


def grad_norm(arena, grads):
    """L2 norm over all gradients through one contiguous pass."""
    return flatten(arena, grads)[: total(grads)].norm().item()  # leak: the temporary workspace has no name


def grad_histogram(arena, grads, bins=64):
    ws = flatten(arena, grads)  # clean: histc copies, then the workspace is given back
    hist = torch.histc(ws[: total(grads)], bins=bins)
    arena.give(ws)
    return hist


def snapshot(arena, grads):
    """A private copy that outlives the arena's workspaces."""
    ws = flatten(arena, grads)  # leak: the clone is returned and the workspace dropped
    return ws[: total(grads)].clone()


def compare(arena, lhs, rhs):
    """Largest difference over the common prefix of two gradient sets."""
    a = arena.maybe_rent(total(lhs))  # leak: returns inf when only the second allocation fails
    b = arena.maybe_rent(total(rhs))  # leak: returns inf when only the first allocation fails
    if a is None or b is None:
        return float("inf")
    n = min(pack(lhs, a), pack(rhs, b))
    diff = (a[:n] - b[:n]).abs().max().item()
    arena.give(a)
    arena.give(b)
    return diff


def power_iterate(arena, matvec, numel, rounds):
    """Ping-pong between two workspaces; returns the dominant norm."""
    cur = arena.rent_zeroed(numel)  # clean: the second rent is inside the try, the finally gives back whichever name it has
    nxt = None
    try:
        nxt = arena.rent(numel)  # clean: swapped with cur but never lost, the finally gives back both
        cur[:numel].normal_()
        for _ in range(rounds):
            matvec(cur[:numel], nxt[:numel])
            nxt.div_(nxt[:numel].norm().clamp_min(1e-12))
            cur, nxt = nxt, cur
        return cur[:numel].norm().item()
    finally:
        arena.give(cur)
        if nxt is not None:
            arena.give(nxt)
