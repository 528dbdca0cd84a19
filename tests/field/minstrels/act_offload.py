"""Activation offload: saved tensors go to pages of host memory in forward and come back in backward.

    off = Offloader(HostPages(512, 1 << 22), DeviceBuffers(4, 1 << 26))
    with off.step():
        loss = model(x)
        loss.backward()
"""
import contextlib
import logging
import threading
import weakref

import torch
from torch.autograd.graph import saved_tensors_hooks

_LOG = logging.getLogger("act_offload")


class SpillError(IOError):
    pass


class Page:
    def __init__(self, index, nbytes):
        self.index = index
        self.mem = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.holders = 0


class HostPages:
    def __init__(self, count, page_bytes):
        self.page_bytes = page_bytes
        self._free = [Page(i, page_bytes) for i in range(count)]
        self._lock = threading.Lock()

    def get(self):
        with self._lock:
            if not self._free:
                return None
            page = self._free.pop()  # clean: handed to the caller
            page.holders = 1
            return page

    def get_many(self, nbytes):
        """All the pages for nbytes, or None."""
        want = -(-nbytes // self.page_bytes)
        got = []
        while len(got) < want:
            page = self.get()  # leak: when the pages run out the ones in got are forgotten
            if page is None:
                _LOG.debug("wanted %d pages, had %d", want, len(got))
                return None
            got.append(page)
        return got

    def hold(self, page):
        with self._lock:
            page.holders += 1
        return page

    def put(self, page):
        with self._lock:
            page.holders -= 1
            if page.holders == 0:
                self._free.append(page)


class DeviceBuffers:
    """Landing places for the pages on their way back. take() waits."""

    def __init__(self, count, nbytes):
        self.nbytes = nbytes
        self._sem = threading.Semaphore(count)
        self._free = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(count)]

    def take(self):
        self._sem.acquire()  # clean: near miss, goes with the buffer, give() releases it
        return self._free.pop()  # clean: handed to the caller

    def give(self, buf):
        self._free.append(buf)
        self._sem.release()


class Handle:
    """What autograd keeps instead of the tensor."""

    def __init__(self, owner, pages, shape, dtype, device):
        self.owner, self.pages = owner, pages
        self.shape, self.dtype, self.device = shape, dtype, device
        self.landing = None
        self.nbytes = shape.numel() * dtype.itemsize

    def write(self, tensor):
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        size = self.owner.pages.page_bytes
        for i, page in enumerate(self.pages):
            part = flat[i * size:(i + 1) * size]
            page.mem[:part.numel()].copy_(part, non_blocking=True)

    def fetch_into(self, buf):
        size = self.owner.pages.page_bytes
        for i, page in enumerate(self.pages):
            n = min(size, self.nbytes - i * size)
            buf[i * size:i * size + n].copy_(page.mem[:n], non_blocking=True)

    def discard(self):
        for page in self.pages:
            self.owner.pages.put(page)
        self.pages = []


class Offloader:
    def __init__(self, pages, device_buffers, min_bytes=1 << 20):
        self.pages, self.device_buffers = pages, device_buffers
        self.min_bytes = min_bytes
        self.live = []

    def pack(self, t):
        nbytes = t.numel() * t.element_size()
        if nbytes < self.min_bytes or nbytes > self.device_buffers.nbytes or not t.is_cuda:
            return t
        pages = self.pages.get_many(nbytes)  # leak: handles that backward never unpacked are dropped by the clear() in step()
        if pages is None:
            return t
        h = Handle(self, pages, t.shape, t.dtype, t.device)
        h.write(t)
        self.live.append(h)
        return h

    def unpack(self, h):
        if not isinstance(h, Handle):
            return h
        buf = h.landing
        if buf is None:
            buf = self.device_buffers.take()  # clean: given back below on both branches of landing
            h.fetch_into(buf)
        out = buf[:h.nbytes].clone().view(h.dtype).view(h.shape)
        self.device_buffers.give(buf)
        h.landing = None
        h.discard()
        self.live.remove(h)
        return out

    def prefetch(self, count):
        """Called by the layer hooks: starts the copies of the handles that are needed next."""
        for h in reversed(self.live[-count:]):
            h.landing = self.device_buffers.take()  # leak: a handle that was prefetched before gets a second buffer over the first
            h.fetch_into(h.landing)

    @contextlib.contextmanager
    def step(self):
        with saved_tensors_hooks(self.pack, self.unpack):
            yield self
        self.live.clear()


class CompressedMul(torch.autograd.Function):
    """x * w that saves x as int8 in one host page."""
    @staticmethod
    def forward(ctx, x, w, pages):
        ctx.pages, ctx.shape, ctx.page = pages, x.shape, None
        ctx.scale = x.abs().max() / 127
        if x.numel() <= pages.page_bytes:
            ctx.page = pages.get()  # leak: when w needs no gradient, backward returns without put
        if ctx.page is None:
            ctx.save_for_backward(x, w)
        else:
            q = (x / ctx.scale).round().to(torch.int8)
            ctx.page.mem[:x.numel()].copy_(q.reshape(-1).view(torch.uint8))
            ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        w = ctx.saved_tensors[-1]
        gx = g * w
        if not ctx.needs_input_grad[1]:
            return gx, None, None
        if ctx.page is None:
            x = ctx.saved_tensors[0]
        else:
            n = ctx.shape.numel()
            x = ctx.page.mem[:n].view(torch.int8).to(g.device, g.dtype).view(ctx.shape) * ctx.scale
            ctx.pages.put(ctx.page)
            ctx.page = None
        return gx, (g * x).sum_to_size(w.shape), None


class Spiller:
    """Writes pages to disk when host memory is short."""

    def __init__(self, pages, path):
        self.pages = pages
        self.bounce = pages.get()  # clean: kept on self, close() puts it, None is possible and checked
        self.f = open(path, "w+b")  # clean: kept on self, close() closes it
        self.where = {}

    def spill(self, key, tensor):
        page = self.pages.get()  # leak: SpillError for a large tensor is handled by spill_all, the page is not put
        if page is None:
            return False
        raw = tensor.reshape(-1).view(torch.uint8)
        if raw.numel() > self.pages.page_bytes:
            raise SpillError("%s does not fit a page" % key)
        page.mem[:raw.numel()].copy_(raw)
        self.where[key] = (self.f.seek(0, 2), raw.numel())
        self.f.write(page.mem[:raw.numel()].numpy().tobytes())
        self.pages.put(page)
        return True

    def spill_all(self, named):
        done = 0
        for key, t in named:
            try:
                done += self.spill(key, t)
            except SpillError as e:
                _LOG.warning("not spilled: %s", e)
        return done

    def back(self, key, out):
        off, n = self.where.pop(key)
        self.f.seek(off)
        if self.bounce is None:
            out.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(self.f.read(n)), dtype=torch.uint8))
            return
        self.f.readinto(memoryview(self.bounce.mem[:n].numpy()))
        out.reshape(-1).view(torch.uint8).copy_(self.bounce.mem[:n])

    def close(self):
        if self.bounce is not None:
            self.pages.put(self.bounce)
            self.bounce = None
        self.f.close()


class SharedInput:
    """One activation that several branches save. Each branch holds the page, drop() of the last one frees it."""

    def __init__(self, pages, tensor, branches):
        self.pages, self.left = pages, branches
        self.page = pages.get()  # clean: near miss, holders counts, the first drop() gives back this one
        if self.page is None:
            raise MemoryError("no page for a shared input")
        for _ in range(branches - 1):
            pages.hold(self.page)  # clean: near miss, one drop() for each branch
        self.page.mem[:tensor.numel()].copy_(tensor.reshape(-1).view(torch.uint8))

    def drop(self):
        if self.left > 0:
            self.left -= 1
            self.pages.put(self.page)


def watch(model, off):
    def before(mod, grad_out):
        if off.live and len(off.live) % 4 == 0:
            off.prefetch(2)
    handles = [m.register_full_backward_pre_hook(before) for m in model.children()]  # clean: near miss, the finalizer removes them with the model
    weakref.finalize(model, lambda: [h.remove() for h in handles])
