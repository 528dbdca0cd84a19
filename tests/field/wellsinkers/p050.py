"""Host buffers by size class, each a power of two."""
import ctypes


class SizeClasses:
    MIN_SHIFT, MAX_SHIFT = 12, 26

    def __init__(self):
        self._lists = {s: [] for s in range(self.MIN_SHIFT, self.MAX_SHIFT + 1)}
        self.outstanding = 0

    @classmethod
    def shift_for(cls, nbytes):
        return max(cls.MIN_SHIFT, (nbytes - 1).bit_length())

    def malloc(self, nbytes):
        shift = self.shift_for(nbytes)
        stack = self._lists[shift]
        buf = stack.pop() if stack else ctypes.create_string_buffer(1 << shift)
        self.outstanding += len(buf)
        return buf

    def free(self, buf):
        self.outstanding -= len(buf)
        self._lists[len(buf).bit_length() - 1].append(buf)


class Checkpointer:
    def __init__(self, hostmem, storage):
        self.hostmem = hostmem
        self.storage = storage

    def save(self, name, tensor_bytes):
        buf = self.hostmem.malloc(len(tensor_bytes))  # clean: freed in finally
        try:
            ctypes.memmove(buf, tensor_bytes, len(tensor_bytes))
            self.storage.write(name, buf)
        finally:
            self.hostmem.free(buf)

    def load(self, name):
        size = self.storage.size(name)
        buf = self.hostmem.malloc(size)  # leak: a short read returns with the buffer
        got = self.storage.readinto(name, buf)
        if got < size:
            return None
        data = bytes(buf[:size])
        self.hostmem.free(buf)
        return data

    def verify(self, name, expected):
        buf = self.hostmem.malloc(len(expected))  # clean: freed before the compare
        self.storage.readinto(name, buf)
        got = bytes(buf[: len(expected)])
        self.hostmem.free(buf)
        return got == expected


def gather(hostmem, storage, names):
    out = b""
    for name in names:
        buf = hostmem.malloc(storage.size(name))  # leak: freed once, after the loop
        storage.readinto(name, buf)
        out += bytes(buf)
    hostmem.free(buf)
    return out
