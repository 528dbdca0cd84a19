"""Bounce buffers: memoryview windows over one bytearray, lent with a handle."""
from contextlib import AbstractContextManager


class Bounce(AbstractContextManager):
    __slots__ = ("_area", "index", "view")

    def __init__(self, area, index, view):
        self._area, self.index, self.view = area, index, view

    def unbounce(self):
        if self.view is not None:
            self.view.release()
            self.view = None
            self._area._free |= 1 << self.index

    def __exit__(self, *exc):
        self.unbounce()


class BounceArea:
    def __init__(self, count, size):
        self._raw = bytearray(count * size)
        self._size = size
        self._free = (1 << count) - 1

    def bounce(self):
        if not self._free:
            raise BufferError("no bounce buffers")
        index = self._free.bit_length() - 1
        self._free ^= 1 << index
        return Bounce(self, index, memoryview(self._raw)[index * self._size:][:self._size])


class BlockDevice:
    def __init__(self, area, hw):
        self.area = area
        self.hw = hw

    def read(self, lba):
        with self.area.bounce() as b:  # clean: with
            self.hw.read_into(lba, b.view)
            return bytes(b.view)

    def write(self, lba, data):
        b = self.area.bounce()  # leak: a write-protected device returns with the buffer
        b.view[: len(data)] = data
        if self.hw.read_only:
            return 0
        self.hw.write_from(lba, b.view)
        b.unbounce()
        return len(data)

    def lend(self):
        return self.area.bounce()  # clean: handed to the caller

    def zero(self, lba):
        b = self.lend()  # clean: given back after the write
        b.view[:] = bytes(len(b.view))
        self.hw.write_from(lba, b.view)
        b.unbounce()


def checksum(device, lbas):
    total = 0
    for lba in lbas:
        b = device.lend()  # leak: one a block, none given back
        device.hw.read_into(lba, b.view)
        total ^= sum(b.view)
    return total
