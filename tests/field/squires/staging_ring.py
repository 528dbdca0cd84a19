"""Pinned staging memory between the data loader, the GPU and the checkpoint writer."""
import threading
from collections import defaultdict, deque
from contextlib import contextmanager

import numpy as np
import torch

MIN_CLASS = 1 << 16


class StagingFull(MemoryError):
    pass


def size_class(nbytes):
    c = MIN_CLASS
    while c < nbytes:
        c <<= 1
    return c


class Staging:
    __slots__ = ("tensor", "cls", "event", "filled")

    def __init__(self, cls):
        self.tensor = torch.empty(cls, dtype=torch.uint8, pin_memory=True)
        self.cls = cls
        self.event = None
        self.filled = 0

    def busy(self):
        return self.event is not None and not self.event.query()

    def put(self, array):
        raw = torch.from_numpy(np.ascontiguousarray(array)).view(torch.uint8).flatten()
        self.tensor[self.filled:self.filled + raw.numel()].copy_(raw)
        self.filled += raw.numel()
        return self


class StagingRing:
    """rent() and hand_back(), in size classes. The cap counts everything that was ever pinned and not dropped."""

    def __init__(self, cap):
        self._cap = cap
        self._pinned = 0
        self._stacks = defaultdict(list)
        self._mu = threading.Lock()

    def rent(self, nbytes):
        cls = size_class(nbytes)
        with self._mu:
            if self._stacks[cls]:
                return self._stacks[cls].pop()  # clean: returned to the caller
            if self._pinned + cls > self._cap:
                for larger in sorted(self._stacks):
                    if larger > cls and self._stacks[larger]:
                        return self._stacks[larger].pop()  # clean: returned to the caller
                raise StagingFull(f"{self._pinned} bytes pinned, {cls} more wanted")
            self._pinned += cls
        return Staging(cls)  # clean: a new one, returned to the caller

    def hand_back(self, buf):
        buf.filled = 0
        with self._mu:
            self._stacks[buf.cls].append(buf)

    def compact(self):
        """Unpin what has been lying around, one buffer of each class stays."""
        dropped = 0
        with self._mu:
            for cls, stack in self._stacks.items():
                for _ in range(len(stack) - 1):
                    buf = stack.pop()  # leak: a buffer that is still busy is taken off the stack, then neither put back nor unpinned
                    if buf.busy():
                        continue
                    buf.tensor = None
                    self._pinned -= cls
                    dropped += cls
        return dropped

    @contextmanager
    def lent(self, nbytes):
        buf = self.rent(nbytes)  # clean: handed back by the finally
        try:
            yield buf
        finally:
            self.hand_back(buf)


def to_device(ring, array, device):
    with ring.lent(array.nbytes) as buf:  # clean: context manager
        buf.put(array)
        out = buf.tensor[:array.nbytes].to(device, non_blocking=True)
        torch.cuda.current_stream().synchronize()
    return out.view(torch.from_numpy(array).dtype).reshape(array.shape)


class AsyncCopier:
    """Copies that overlap with compute. Buffers come back when their event has passed."""

    def __init__(self, ring, device, depth=4):
        self.ring, self.device, self.depth = ring, device, depth
        self._flying = deque()
        self._stream = torch.cuda.Stream(device)

    def copy(self, array):
        while len(self._flying) >= self.depth:
            self._land()
        buf = self.ring.rent(array.nbytes)  # clean: near miss, flies in the deque until _land() hands it back
        with torch.cuda.stream(self._stream):
            out = buf.put(array).tensor[:array.nbytes].to(self.device, non_blocking=True)
            buf.event = torch.cuda.Event()
            buf.event.record()
        self._flying.append(buf)
        return out

    def _land(self):
        buf = self._flying.popleft()
        buf.event.synchronize()
        buf.event = None
        self.ring.hand_back(buf)

    def close(self):
        while self._flying:
            self._land()


# ---- loaders


def packed(ring, samples, batch_bytes):
    """Pack samples into large pieces; a piece is valid until the next one is asked for."""
    for chunk in _split(samples, batch_bytes):
        buf = ring.rent(batch_bytes)  # clean: near miss, the finally also runs when the consumer stops early
        try:
            for sample in chunk:
                buf.put(sample)
            yield buf.tensor[:buf.filled]
        finally:
            ring.hand_back(buf)


def _split(samples, limit):
    chunk, size = [], 0
    for sample in samples:
        if chunk and size + sample.nbytes > limit:
            yield chunk
            chunk, size = [], 0
        chunk.append(sample)
        size += sample.nbytes
    if chunk:
        yield chunk


def windows(ring, tokens, length, stride):
    for start in range(0, len(tokens) - length + 1, stride):
        window = tokens[start:start + length]
        buf = ring.rent(window.nbytes)  # leak: perplexity() stops early, then the generator is closed at the yield
        buf.put(window)
        yield buf.tensor[:buf.filled].view(torch.int64)
        ring.hand_back(buf)


def perplexity(model, ring, tokens, length=1024, max_windows=64):
    total, seen = 0.0, 0
    for ids in windows(ring, tokens, length, length // 2):
        total += model.loss(ids).item()
        seen += 1
        if seen == max_windows:
            break
    return float(np.exp(total / max(seen, 1)))


# ---- offload of activations


class ActivationOffload:
    """Keeps the input of some layers in pinned memory between forward and backward."""

    def __init__(self, ring):
        self.ring = ring
        self._stash = {}
        self._handles = []

    def attach(self, layers):
        for name, layer in layers:
            self._handles.append(layer.register_forward_hook(lambda m, args, out, n=name: self._save(n, args[0])))
            self._handles.append(layer.register_full_backward_pre_hook(lambda m, grad, n=name: self._load(n)))

    def _save(self, name, x):
        if name in self._stash:
            return
        buf = self.ring.rent(x.numel() * x.element_size())  # leak: detach() clears the stash without handing back
        buf.tensor[:x.numel() * x.element_size()].copy_(x.detach().view(torch.uint8).flatten(), non_blocking=True)
        self._stash[name] = buf

    def _load(self, name):
        buf = self._stash.pop(name, None)
        if buf is not None:
            self.ring.hand_back(buf)

    def detach(self):
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stash.clear()


# ---- checkpoints


def dump(ring, named, write, bucket_bytes=1 << 26):
    """Write parameters in buckets; write(buf, done) calls done(buf) when the bytes are on disk."""
    bucket = ring.rent(bucket_bytes)  # leak: without parameters the bucket stays empty and is neither written nor handed back
    for name, param in named:
        array = param.detach().cpu().numpy()
        if bucket.filled + array.nbytes > bucket_bytes:
            write(bucket, ring.hand_back)
            bucket = ring.rent(bucket_bytes)  # clean: near miss, it gets an array at once, so the last write is sure to take it
        bucket.put(array)
    if bucket.filled:
        write(bucket, ring.hand_back)


def convert(ring, shards, sink):
    """Double buffering: one half is read while the other one is written."""
    front = ring.rent(shards.nbytes)  # leak: StagingFull for the back half
    back = ring.rent(shards.nbytes)  # clean: handed back in the finally, under whichever name
    try:
        shards.read_into(front)
        while shards.more():
            fence = sink.write_async(front)
            shards.read_into(back)
            fence.wait()
            front, back = back, front
        sink.write_async(front).wait()
    finally:
        ring.hand_back(front)
        ring.hand_back(back)
