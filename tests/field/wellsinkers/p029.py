"""Device buffers that must be unmapped before the next dispatch."""
import enum


class MapState(enum.Enum):
    IDLE = 0
    READ = 1
    WRITE = 2


class GpuBuffers:
    def __init__(self, sizes):
        self.memory = [bytearray(n) for n in sizes]
        self.state = [MapState.IDLE] * len(sizes)

    def map_buffer(self, index, write=False):
        if self.state[index] is not MapState.IDLE:
            raise ValueError(f"buffer {index} is mapped")
        self.state[index] = MapState.WRITE if write else MapState.READ
        return memoryview(self.memory[index])

    def unmap_buffer(self, index):
        self.state[index] = MapState.IDLE

    def mapped(self):
        return [i for i, s in enumerate(self.state) if s is not MapState.IDLE]


class UniformWriter:
    def __init__(self, buffers, index):
        self.buffers = buffers
        self.index = index

    def write(self, offset, blob):
        view = self.buffers.map_buffer(self.index, write=True)  # leak: mapped when it does not fit
        if offset + len(blob) > len(view):
            return 0
        view[offset:offset + len(blob)] = blob
        self.buffers.unmap_buffer(self.index)
        return len(blob)

    def clear(self):
        view = self.buffers.map_buffer(self.index, write=True)  # clean: unmapped after the fill
        view[:] = bytes(len(view))
        self.buffers.unmap_buffer(self.index)

    def read(self, n):
        view = self.buffers.map_buffer(self.index)  # clean: unmapped in finally
        try:
            return bytes(view[:n])
        finally:
            self.buffers.unmap_buffer(self.index)


def digest(buffers):
    total = 0
    for index in range(len(buffers.memory)):
        view = buffers.map_buffer(index)  # leak: the break leaves the last one mapped
        if not view:
            break
        total = (total * 31 + sum(view)) & 0xFFFFFFFF
        buffers.unmap_buffer(index)
    return total
