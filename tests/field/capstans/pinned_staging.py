"""Pinned host buffers for weight streaming and KV offload.

Buffers come in power-of-two classes. A copy in flight holds its buffer until its event has
passed; reap() gives those back.
"""
import collections
import threading
import time

import torch


class PinnedBuf:
    def __init__(self, cls_bits):
        self.cls_bits = cls_bits
        self.mem = torch.empty(1 << cls_bits, dtype=torch.uint8, pin_memory=True)
        self.used = 0


class PinnedPool:
    def __init__(self, min_bits=16, max_bits=30, per_class=4):
        self.min_bits = min_bits
        self.max_bits = max_bits
        self._cv = threading.Condition()
        self._stacks = {b: [] for b in range(min_bits, max_bits + 1)}
        self._room = {b: per_class for b in range(min_bits, max_bits + 1)}

    def _bits(self, nbytes):
        return max(self.min_bits, (nbytes - 1).bit_length())

    def rent(self, nbytes):
        """Returns None when the class is exhausted."""
        bits = self._bits(nbytes)
        if bits > self.max_bits:
            raise ValueError("no class for %d bytes" % nbytes)
        with self._cv:
            if self._stacks[bits]:
                return self._stacks[bits].pop()  # clean: handed to the caller
            if self._room[bits] == 0:
                return None
            self._room[bits] -= 1
        return PinnedBuf(bits)

    def rent_wait(self, nbytes, timeout):
        deadline = time.monotonic() + timeout
        while True:
            buf = self.rent(nbytes)  # clean: returned as soon as it is not None
            if buf is not None:
                return buf
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("pinned pool")
            with self._cv:
                self._cv.wait(left)

    def rent_any(self, nbytes):
        """A buffer of the wanted class, or the next one up."""
        buf = self.rent(nbytes)  # clean: near miss, the second rent runs only when this one is None
        if buf is None and self._bits(nbytes) < self.max_bits:
            buf = self.rent(nbytes * 2)  # clean: returned to the caller
        return buf

    def rent_capped(self, nbytes, cap):
        buf = self.rent(nbytes)  # leak: a buffer whose class is over the cap is refused and not put back
        if buf is None or buf.mem.numel() > cap:
            return None
        return buf

    def put(self, buf):
        buf.used = 0
        with self._cv:
            self._stacks[buf.cls_bits].append(buf)
            self._cv.notify()


class Upload:
    def __init__(self, name, buf, dst):
        self.name = name
        self.buf = buf
        self.dst = dst
        self.event = None


class Streamer:
    def __init__(self, pool, stream):
        self.pool = pool
        self.stream = stream
        self.inflight = collections.deque()
        self.parked = {}
        self.failed = []

    def push(self, name, src, dst):
        buf = self.pool.rent_wait(src.nbytes, 5.0)  # clean: goes with the upload to self.inflight, given back by reap()
        buf.mem[:src.nbytes].copy_(src.view(torch.uint8).flatten())
        up = Upload(name, buf, dst)
        with torch.cuda.stream(self.stream):
            dst.view(torch.uint8).flatten().copy_(buf.mem[:src.nbytes], non_blocking=True)
            up.event = torch.cuda.Event()
            up.event.record(self.stream)
        self.inflight.append(up)
        return up

    def push_file(self, name, fh, nbytes, dst):
        buf = self.pool.rent_wait(nbytes, 5.0)  # leak: a short read raises before the upload owns the buffer
        got = fh.readinto(buf.mem.numpy()[:nbytes])
        if got != nbytes:
            raise EOFError("%s: %d of %d bytes" % (name, got, nbytes))
        self._launch(Upload(name, buf, dst), nbytes)

    def push_file_checked(self, name, fh, nbytes, dst):
        buf = self.pool.rent_wait(nbytes, 5.0)  # clean: put back on a short read, else owned by the upload
        got = fh.readinto(buf.mem.numpy()[:nbytes])
        if got != nbytes:
            self.pool.put(buf)
            raise EOFError("%s: %d of %d bytes" % (name, got, nbytes))
        self._launch(Upload(name, buf, dst), nbytes)

    def _launch(self, up, nbytes):
        up.buf.used = nbytes
        with torch.cuda.stream(self.stream):
            up.dst.view(torch.uint8).flatten().copy_(up.buf.mem[:nbytes], non_blocking=True)
            up.event = torch.cuda.Event()
            up.event.record(self.stream)
        self.inflight.append(up)

    def reap(self):
        n = 0
        while self.inflight and self.inflight[0].event.query():
            self.pool.put(self.inflight.popleft().buf)
            n += 1
        return n

    def drain(self):
        while self.inflight:
            up = self.inflight.popleft()
            up.event.synchronize()
            self.pool.put(up.buf)

    # parked buffers hold offloaded layers

    def park(self, layer, weights):
        buf = self.pool.rent(weights.nbytes)  # leak: a layer that is parked already loses its old buffer to this one
        if buf is None:
            return False
        buf.mem[:weights.nbytes].copy_(weights.view(torch.uint8).flatten())
        buf.used = weights.nbytes
        self.parked[layer] = buf
        return True

    def repark(self, layer, weights):
        buf = self.pool.rent(weights.nbytes)  # clean: near miss, the old buffer is put back before the entry changes
        if buf is None:
            return False
        buf.mem[:weights.nbytes].copy_(weights.view(torch.uint8).flatten())
        old = self.parked.pop(layer, None)
        if old is not None:
            self.pool.put(old)
        self.parked[layer] = buf
        return True

    def unpark(self, layer, dst):
        buf = self.parked.pop(layer)
        dst.view(torch.uint8).flatten().copy_(buf.mem[:dst.nbytes])
        self.pool.put(buf)

    def unpark_all(self):
        for layer in list(self.parked):
            self.pool.put(self.parked.pop(layer))

    # helpers of the loader

    def read_header(self, fh, nbytes):
        buf = self.pool.rent(nbytes)  # clean: put back on both ways out
        if buf is None:
            return fh.read(nbytes)
        fh.readinto(buf.mem.numpy()[:nbytes])
        head = bytes(buf.mem[:nbytes].tolist())
        if not head.startswith(b"KVX1"):
            self.pool.put(buf)
            return b""
        self.pool.put(buf)
        return head

    def fetch_tensor(self, src):
        buf = self._download(src)  # leak: the caller gets a clone and the rented buffer is dropped
        return buf.mem[:src.nbytes].clone().view(src.dtype).view(src.shape)

    def _download(self, src):
        buf = self.pool.rent_wait(src.nbytes, 5.0)  # clean: returned to the caller
        buf.mem[:src.nbytes].copy_(src.view(torch.uint8).flatten())
        return buf

    def compare(self, left, right):
        a = self._download(left)  # leak: sizes that differ return False with both buffers out
        b = self._download(right)  # leak: sizes that differ return False with both buffers out
        if left.nbytes != right.nbytes:
            return False
        same = torch.equal(a.mem[:left.nbytes], b.mem[:left.nbytes])
        self.pool.put(a)
        self.pool.put(b)
        return same

    def checksum(self, tensors):
        total = 0
        buf = None
        for t in tensors:
            if buf is None:
                buf = self.pool.rent_wait(1 << 20, 5.0)  # clean: near miss, rented once for the loop and put back after it
            n = min(t.nbytes, 1 << 20)
            buf.mem[:n].copy_(t.view(torch.uint8).flatten()[:n])
            total += int(buf.mem[:n].sum())
        if buf is not None:
            self.pool.put(buf)
        return total
