"""Tensor-map descriptors (TMA) in class-level state with class methods."""
import threading


class TmaDescriptors:
    LIMIT = 32
    _lock = threading.Lock()
    _bitmap = 0
    _layouts = {}

    @classmethod
    def encode(cls, layout):
        with cls._lock:
            for i in range(cls.LIMIT):
                if not cls._bitmap >> i & 1:
                    cls._bitmap |= 1 << i
                    cls._layouts[i] = layout
                    return i
        return None

    @classmethod
    def erase(cls, desc):
        with cls._lock:
            cls._bitmap &= ~(1 << desc)
            cls._layouts.pop(desc, None)

    @classmethod
    def layout(cls, desc):
        return cls._layouts[desc]


def tiled_copy(gpu, src, dst):
    desc = TmaDescriptors.encode(src.layout)  # clean: erased in finally
    if desc is None:
        return gpu.copy(src, dst)
    try:
        return gpu.tma_copy(desc, src, dst)
    finally:
        TmaDescriptors.erase(desc)


def tiled_load(gpu, src):
    desc = TmaDescriptors.encode(src.layout)  # leak: a misaligned source returns with the descriptor
    if desc is None or src.addr % 16:
        return gpu.load(src)
    out = gpu.tma_load(desc, src)
    TmaDescriptors.erase(desc)
    return out


def two_operand(gpu, a, b):
    da = TmaDescriptors.encode(a.layout)  # clean: erased at the end
    db = TmaDescriptors.encode(b.layout)  # leak: da is erased, db is not
    out = gpu.gemm(da, db)
    if da is not None:
        TmaDescriptors.erase(da)
    return out


class Kernel:
    def __init__(self, layout):
        self.desc = TmaDescriptors.encode(layout)  # clean: destroy() erases it

    def destroy(self):
        if self.desc is not None:
            TmaDescriptors.erase(self.desc)
            self.desc = None
