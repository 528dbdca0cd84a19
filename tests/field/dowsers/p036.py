"""Tensor handles with generations: (index, generation) packed in one int."""
from array import array


class TensorTable:
    BITS = 20

    def __init__(self, size):
        self._gen = array("L", [0] * size)
        self._obj = [None] * size
        self._free = list(range(size))

    def register(self, tensor):
        if not self._free:
            return 0
        index = self._free.pop()
        self._gen[index] += 1
        self._obj[index] = tensor
        return (self._gen[index] << self.BITS) | index

    def resolve(self, handle):
        index = handle & ((1 << self.BITS) - 1)
        if self._gen[index] != handle >> self.BITS:
            return None
        return self._obj[index]

    def retire(self, handle):
        index = handle & ((1 << self.BITS) - 1)
        if self._gen[index] == handle >> self.BITS and self._obj[index] is not None:
            self._obj[index] = None
            self._free.append(index)


class RpcTensors:
    def __init__(self, table: TensorTable, peer):
        self.table = table
        self.peer = peer

    def call(self, method, tensor):
        handle = self.table.register(tensor)  # clean: retired in finally
        if not handle:
            return None
        try:
            return self.peer.call(method, handle)
        finally:
            self.table.retire(handle)

    def offer(self, tensor):
        handle = self.table.register(tensor)  # leak: a declined offer stays registered
        if handle and not self.peer.offer(handle):
            return False
        self.table.retire(handle)
        return True

    def export(self, tensor):
        return self.table.register(tensor)  # clean: handed to the caller

    def announce(self, tensors):
        for t in tensors:
            handle = self.export(t)  # leak: overwritten each turn, never retired
            self.peer.notify(handle)

    def mirror(self, tensor):
        handle = self.export(tensor)  # clean: retired after the copy
        self.peer.pull(handle)
        self.table.retire(handle)
