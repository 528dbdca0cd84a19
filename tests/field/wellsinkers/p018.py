"""Pool of pinned host buffers that doubles when it runs dry."""
import torch


class HostBuffers:
    def __init__(self, nbytes, start=2, ceiling=64):
        self.nbytes = nbytes
        self.ceiling = ceiling
        self.buffers = []
        self.spare = []
        self._grow(start)

    def _grow(self, n):
        n = min(n, self.ceiling - len(self.buffers))
        for _ in range(n):
            self.spare.append(len(self.buffers))
            self.buffers.append(torch.empty(self.nbytes, dtype=torch.uint8))
        return n > 0

    def next_buffer(self):
        if not self.spare and not self._grow(len(self.buffers)):
            raise RuntimeError("host buffers at ceiling")
        return self.spare.pop()

    def recycle(self, index):
        self.spare.append(index)


class Offloader:
    def __init__(self, host):
        self.host = host
        self.parked = {}

    def offload(self, name, tensor):
        index = self.host.next_buffer()  # clean: kept in parked, recycled by onload
        self.host.buffers[index][: tensor.numel()].copy_(tensor.view(torch.uint8).flatten())
        self.parked[name] = index

    def onload(self, name, out):
        index = self.parked.pop(name)
        out.copy_(self.host.buffers[index][: out.numel()])
        self.host.recycle(index)

    def swap(self, a, b):
        index = self.host.next_buffer()  # leak: kept when the shapes differ
        if a.shape != b.shape:
            return False
        tmp = self.host.buffers[index][: a.numel()]
        tmp.copy_(a)
        a.copy_(b)
        b.copy_(tmp)
        self.host.recycle(index)
        return True


def checksum(host, tensor):
    index = host.next_buffer()  # clean: recycled in finally
    try:
        host.buffers[index][: tensor.numel()].copy_(tensor)
        return int(host.buffers[index].sum())
    finally:
        host.recycle(index)


def prime(host, n):
    for _ in range(n):
        host.buffers[host.next_buffer()].zero_()  # leak: index used once and dropped
