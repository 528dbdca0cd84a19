"""Activation offload to pinned host memory through saved-tensor hooks."""
import queue
import threading

import torch


class PinnedStaging:
    """A bounded set of equally sized pinned host slabs."""

    def __init__(self, slabs, numel, dtype=torch.float16):
        self.numel = numel
        self._q = queue.Queue()
        for _ in range(slabs):
            self._q.put(torch.empty(numel, dtype=dtype, pin_memory=torch.cuda.is_available()))

    def borrow(self, block=True):
        return self._q.get(block)  # clean: handed to the caller

    def try_borrow(self):
        try:
            return self._q.get_nowait()  # clean: handed to the caller
        except queue.Empty:
            return None

    def restore(self, slab):
        self._q.put(slab)

    def audit(self):
        """Count the slabs that hold NaN."""
        seen, bad = [], 0
        while not self._q.empty():
            slab = self._q.get()  # leak: slabs with NaN go on without being put back
            if torch.isnan(slab).any():
                bad += 1
                continue
            seen.append(slab)
        for slab in seen:
            self._q.put(slab)
        return bad


class Ticket:
    __slots__ = ("slab", "shape", "device", "raw")

    def __init__(self, slab=None, shape=None, device=None, raw=None):
        self.slab = slab
        self.shape = shape
        self.device = device
        self.raw = raw


class OffloadHooks:
    """pack/unpack pair for ``torch.autograd.graph.saved_tensors_hooks``."""

    def __init__(self, staging, min_numel=1024):
        self.staging = staging
        self.min_numel = min_numel

    def pack(self, t):
        if t.numel() < self.min_numel or t.numel() > self.staging.numel:
            return Ticket(raw=t)
        slab = self.staging.try_borrow()  # clean: near miss, None holds nothing, otherwise the ticket carries it to unpack
        if slab is None:
            return Ticket(raw=t)
        slab[: t.numel()].copy_(t.reshape(-1), non_blocking=True)
        return Ticket(slab, t.shape, t.device)

    def unpack(self, ticket):
        if ticket.slab is None:
            return ticket.raw
        n = ticket.shape.numel()
        out = ticket.slab[:n].to(ticket.device).view(ticket.shape)
        self.staging.restore(ticket.slab)
        ticket.slab, ticket.raw = None, out
        return out

    def __enter__(self):
        self._ctx = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        self._ctx.__enter__()
        return self

    def __exit__(self, *exc):
        return self._ctx.__exit__(*exc)


class OffloadFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fn, staging):
        ctx.fn, ctx.staging, ctx.shape = fn, staging, x.shape
        ctx.slab = staging.borrow()  # clean: near miss, the context keeps it until backward restores it
        ctx.slab[: x.numel()].copy_(x.reshape(-1))
        with torch.no_grad():
            return fn(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.slab[: ctx.shape.numel()].view(ctx.shape).to(grad.device, grad.dtype)
        ctx.staging.restore(ctx.slab)
        x.requires_grad_(True)
        with torch.enable_grad():
            y = ctx.fn(x)
        (gx,) = torch.autograd.grad(y, x, grad)
        return gx, None, None


class OffloadResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, staging):
        ctx.staging, ctx.shape = staging, x.shape
        ctx.slab = staging.borrow()  # leak: backward returns early without restoring when the scale needs no gradient
        ctx.slab[: x.numel()].copy_(x.reshape(-1))
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        (scale,) = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return grad * scale, None, None
        x = ctx.slab[: ctx.shape.numel()].view(ctx.shape).to(grad.device, grad.dtype)
        gs = (grad * x).sum()
        ctx.staging.restore(ctx.slab)
        return grad * scale, gs, None


class Prefetcher:
    """Brings parameter shards to the device one layer ahead."""

    def __init__(self, staging, source):
        self.staging = staging
        self.source = source
        self.ready = {}
        self.mutex = threading.Lock()

    def prefetch(self, layer):
        if not self.mutex.acquire(blocking=False):  # leak: the already-present return keeps the mutex locked
            return False
        if layer in self.ready:
            return True
        slab = self.staging.borrow()  # clean: near miss, parked in ready and restored by fetch or reset
        slab.copy_(self.source[layer])
        self.ready[layer] = slab
        self.mutex.release()
        return True

    def fetch(self, layer, device):
        slab = self.ready.pop(layer, None)
        if slab is None:
            slab = self.staging.borrow()  # clean: near miss, the shared tail restores either slab
            slab.copy_(self.source[layer])
        out = slab.to(device, copy=True)
        self.staging.restore(slab)
        return out

    def compare(self, a, b):
        left = self.staging.borrow()  # leak: not restored when the second slab is unavailable
        right = self.staging.try_borrow()  # clean: restored at the end, None holds nothing
        if right is None:
            return None
        left.copy_(self.source[a])
        right.copy_(self.source[b])
        same = torch.equal(left, right)
        self.staging.restore(left)
        self.staging.restore(right)
        return same

    def reset(self):
        with self.mutex:
            for slab in self.ready.values():
                self.staging.restore(slab)
            self.ready.clear()
