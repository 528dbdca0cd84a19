"""Pinned host buffers in size classes."""
from collections import defaultdict


class PinnedHost:
    def __init__(self, cuda, limit):
        self._cuda = cuda
        self._limit = limit
        self._total = 0
        self._bins = defaultdict(list)

    @staticmethod
    def _bin(nbytes):
        return max(12, (nbytes - 1).bit_length())

    def borrow(self, nbytes):
        size = self._bin(nbytes)
        if self._bins[size]:
            return self._bins[size].pop()
        if self._total + (1 << size) > self._limit:
            self._trim()
        self._total += 1 << size
        return self._cuda.host_alloc(1 << size)

    def give_back(self, buf):
        self._bins[self._bin(buf.nbytes)].append(buf)

    def _trim(self):
        for size, bufs in self._bins.items():
            while bufs:
                self._cuda.host_free(bufs.pop())
                self._total -= 1 << size


class CheckpointWriter:
    def __init__(self, host: PinnedHost, sink):
        self.host = host
        self.sink = sink

    def write(self, name, tensor):
        buf = self.host.borrow(tensor.nbytes)  # clean: given back in finally
        try:
            tensor.copy_into(buf)
            self.sink.put(name, buf)
        finally:
            self.host.give_back(buf)

    def write_delta(self, name, tensor, base):
        buf = self.host.borrow(tensor.nbytes)  # leak: nothing changed, returns with the buffer
        changed = tensor.diff_into(base, buf)
        if not changed:
            return 0
        self.sink.put(name, buf)
        self.host.give_back(buf)
        return changed

    def snapshot(self, tensor):
        buf = self.host.borrow(tensor.nbytes)  # clean: returned to the caller
        tensor.copy_into(buf)
        return buf

    def digest(self, tensor, hasher):
        buf = self.snapshot(tensor)  # leak: the snapshot's buffer is never given back
        hasher.update(buf)
        return hasher.hexdigest()

    def echo(self, tensor, peer):
        buf = self.snapshot(tensor)  # clean: given back after sending
        peer.send(buf)
        self.host.give_back(buf)
