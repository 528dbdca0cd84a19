"""Optimizer-state and activation offload through a pool of pinned host buffers."""
from __future__ import annotations

import threading
from collections import defaultdict

import torch


class PinnedPool:
    """Size-bucketed pinned buffers. get() hands one out, put() takes it back."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.in_use = 0
        self._idle: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._lock = threading.Lock()

    @staticmethod
    def _bucket(nbytes: int) -> int:
        return 1 << max(12, (nbytes - 1).bit_length())

    def get(self, nbytes: int) -> torch.Tensor:
        buf = self.try_get(nbytes)  # clean: None raises, otherwise handed to the caller
        if buf is None:
            raise MemoryError(f"pinned pool exhausted ({self.in_use}/{self.max_bytes})")
        return buf

    def try_get(self, nbytes: int) -> torch.Tensor | None:
        size = self._bucket(nbytes)
        with self._lock:
            if self.in_use + size > self.max_bytes:
                return None
            self.in_use += size
            if self._idle[size]:
                return self._idle[size].pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def put(self, buf: torch.Tensor) -> None:
        with self._lock:
            self.in_use -= buf.numel()
            self._idle[buf.numel()].append(buf)


def nbytes(t: torch.Tensor) -> int:
    return t.numel() * t.element_size()


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(-1).view(torch.uint8)


class StateOffloader:
    def __init__(self, pool: PinnedPool, stream: torch.cuda.Stream) -> None:
        self.pool = pool
        self.stream = stream
        self.host: dict[str, torch.Tensor] = {}
        self.meta: dict[str, tuple[torch.Size, torch.dtype]] = {}

    def _stage(self, t: torch.Tensor) -> torch.Tensor:
        buf = self.pool.get(nbytes(t))  # clean: returned to the caller, who owns it
        with torch.cuda.stream(self.stream):
            buf[: nbytes(t)].copy_(as_bytes(t), non_blocking=True)
        return buf

    def offload(self, name: str, t: torch.Tensor) -> None:
        old = self.host.pop(name, None)
        if old is not None:
            self.pool.put(old)
        self.host[name] = self._stage(t)  # clean: near miss, the previous buffer of that name was put back above
        self.meta[name] = (t.shape, t.dtype)

    def offload_all(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, t in tensors.items():
            self.host[name] = self._stage(t)  # leak: a name offloaded before has its buffer overwritten
            self.meta[name] = (t.shape, t.dtype)

    def fetch(self, name: str, device: torch.device) -> torch.Tensor:
        buf = self.host.pop(name)
        shape, dtype = self.meta.pop(name)
        n = shape.numel() * dtype.itemsize
        out = buf[:n].to(device).view(dtype).view(shape)
        self.pool.put(buf)
        return out

    def snapshot(self, t: torch.Tensor) -> torch.Tensor:
        """A pageable CPU copy, made through pinned memory."""
        buf = self._stage(t)  # leak: only the clone goes out, the pinned buffer is dropped
        self.stream.synchronize()
        return buf[: nbytes(t)].clone().view(t.dtype).view(t.shape)

    def swap_pair(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        first = self.pool.try_get(nbytes(a))  # leak: lost when the second buffer is not to be had
        if first is None:
            return False
        second = self.pool.try_get(nbytes(b))  # clean: put back after the exchange
        if second is None:
            return False
        first[: nbytes(a)].copy_(as_bytes(a))
        second[: nbytes(b)].copy_(as_bytes(b))
        a.copy_(second[: nbytes(b)].view(b.dtype).view(a.shape))
        b.copy_(first[: nbytes(a)].view(a.dtype).view(b.shape))
        self.pool.put(second)
        self.pool.put(first)
        return True

    def clear(self) -> None:
        for buf in self.host.values():
            self.pool.put(buf)
        self.host.clear()
        self.meta.clear()


class saved_on_host:
    """Saved-tensor hooks that keep large activations in pinned memory until backward."""

    def __init__(self, pool: PinnedPool, threshold: int = 1 << 20) -> None:
        self.pool = pool
        self.threshold = threshold
        self.live: list[torch.Tensor] = []
        self.probe: torch.Tensor | None = None
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, t: torch.Tensor):
        if nbytes(t) < self.threshold or not t.is_cuda:
            return t
        buf = self.pool.try_get(nbytes(t))  # clean: near miss, None falls back to the device, else listed in live until close()
        if buf is None:
            return t
        self.live.append(buf)
        buf[: nbytes(t)].copy_(as_bytes(t))
        return buf, t.shape, t.dtype, t.device

    def _unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        buf, shape, dtype, device = packed
        n = shape.numel() * dtype.itemsize
        return buf[:n].to(device).view(dtype).view(shape)

    def __enter__(self) -> "saved_on_host":
        self.probe = self.pool.get(self.threshold)  # leak: __exit__ returns before giving the probe back when nothing was saved
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc) -> None:
        self._hooks.__exit__(*exc)
        if not self.live:
            return
        self.pool.put(self.probe)
        self.probe = None

    def close(self) -> None:
        for buf in self.live:
            self.pool.put(buf)
        self.live.clear()


def copy_grads(pool: PinnedPool, params: list[torch.nn.Parameter], out: dict[int, torch.Tensor]) -> None:
    for i, p in enumerate(params):
        if p.grad is None:
            continue
        buf = pool.get(nbytes(p.grad))  # leak: the continue for non-finite gradients skips the put
        buf[: nbytes(p.grad)].copy_(as_bytes(p.grad))
        host = buf[: nbytes(p.grad)].view(p.grad.dtype)
        if not torch.isfinite(host).all():
            out.pop(i, None)
            continue
        out[i] = host.clone().view(p.grad.shape)
        pool.put(buf)


def train_step(pool: PinnedPool, model: torch.nn.Module, batch: torch.Tensor) -> float:
    saver = saved_on_host(pool)
    with saver:
        loss = model(batch).mean()
    try:
        loss.backward()
    finally:
        saver.close()
    return float(loss)


def mirror_weights(off: StateOffloader, model: torch.nn.Module, steps: int, step_fn) -> None:
    """Keeps a host mirror of the weights, refreshed after every step."""
    for _ in range(steps):
        step_fn(model)
        off.offload_all({k: p.detach() for k, p in model.named_parameters()})
    off.clear()
