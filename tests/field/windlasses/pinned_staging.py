"""Host staging tensors, cached by shape and dtype, for H2D copies."""
import threading
from collections import defaultdict

import torch


class StagingCache:
    """rent(shape, dtype) -> tensor; give(tensor) puts it under its shape."""

    def __init__(self, max_bytes):
        self.max_bytes = max_bytes
        self.out_bytes = 0
        self._by_key = defaultdict(list)
        self._lock = threading.Lock()

    @staticmethod
    def _key(shape, dtype):
        return tuple(shape), dtype

    def rent(self, shape, dtype=torch.float32):
        key = self._key(shape, dtype)
        with self._lock:
            if self._by_key[key]:
                t = self._by_key[key].pop()  # clean: returned to the renter
            else:
                t = torch.empty(shape, dtype=dtype)
            self.out_bytes += t.numel() * t.element_size()
            return t

    def rent_checked(self, shape, dtype=torch.float32):
        """None instead of going over max_bytes."""
        t = self.rent(shape, dtype)  # leak: over the limit it returns None without give()
        if self.out_bytes > self.max_bytes:
            return None
        return t

    def give(self, t):
        with self._lock:
            self.out_bytes -= t.numel() * t.element_size()
            self._by_key[self._key(t.shape, t.dtype)].append(t)


class Normalizer:
    def __init__(self, cache, mean, std):
        self.cache = cache
        self.mean = mean
        self.std = std

    def normalized(self, x):
        """Result is in a rented tensor that the caller gives back."""
        out = self.cache.rent(x.shape)  # clean: returned, the caller gives it back
        torch.sub(x, self.mean, out=out)
        out.div_(self.std)
        return out

    def whiten_(self, x):
        y = self.normalized(x)  # clean: copied from and then given back
        x.copy_(y)
        self.cache.give(y)
        return x

    def stats(self, x):
        y = self.normalized(x)  # leak: the rented result is reduced and forgotten
        return float(y.mean()), float(y.std())


class Uploader:
    def __init__(self, cache, norm, device):
        self.cache = cache
        self.norm = norm
        self.device = device
        self.waiting = []

    def upload(self, batch):
        """Non-blocking copy; the staging tensor is given back by reap()."""
        host = self.cache.rent(batch.shape, batch.dtype)  # clean: waits in self.waiting until reap() gives it
        host.copy_(batch)
        dev = host.to(self.device, non_blocking=True)
        event = torch.cuda.Event() if self.device.type == "cuda" else None
        if event is not None:
            event.record()
        self.waiting.append((event, host))
        return dev

    def reap(self, block=False):
        left = []
        for event, host in self.waiting:
            if event is not None and not event.query():
                if not block:
                    left.append((event, host))
                    continue
                event.synchronize()
            self.cache.give(host)
        self.waiting = left

    def upload_normalized(self, batch, out):
        out.copy_(self.norm.normalized(batch))  # leak: the temporary is only an argument of copy_, nobody gives it
        return out

    def upload_masked(self, batch, mask):
        tmp = self.cache.rent(batch.shape, batch.dtype)  # clean: near miss, given on the all-masked return and at the end
        if mask is not None and not bool(mask.any()):
            self.cache.give(tmp)
            return None
        tmp.copy_(batch)
        if mask is not None:
            tmp.mul_(mask)
        dev = tmp.to(self.device, copy=True)
        self.cache.give(tmp)
        return dev

    def concat(self, parts):
        """Pad parts to one length through scratch; returns a device tensor."""
        width = max(p.shape[-1] for p in parts)
        rows = []
        scratch = None
        for p in parts:
            scratch = self.cache.rent((width,), p.dtype)  # leak: rebound at each part, only the last one is given
            scratch.zero_()
            scratch[: p.shape[-1]].copy_(p)
            rows.append(scratch.to(self.device, copy=True))
        if scratch is not None:
            self.cache.give(scratch)
        return torch.stack(rows)


def accumulate(cache, grads, own_buffer=None):
    """Sum of grads in own_buffer, or in a rented tensor copied out at the end."""
    rented = own_buffer is None
    acc = own_buffer
    if rented:
        acc = cache.rent(grads[0].shape, grads[0].dtype)  # clean: near miss, the same flag guards give()
    acc.zero_()
    for g in grads:
        acc.add_(g)
    if not rented:
        return acc
    result = acc.clone()
    cache.give(acc)
    return result
