"""Moves named vectors between buffers and files."""
import os


class SwapError(Exception):
    pass


class Swapper:
    def __init__(self, buffers, files):
        self.buffers = buffers
        self.files = files
        self.resident = {}

    def swap_in(self, key, numel):
        """Loads a vector; it stays resident until swap_out()."""
        buf = self.resident.get(key)
        if buf is not None:
            return buf.data[:numel]
        buf = self.buffers.fetch_fitting(numel)  # clean: resident until swap_out(), stowed on a short read
        if buf is None:
            raise SwapError(f"no buffer of {numel}")
        f = self.files.enter(key)  # clean: left behind the read on both ways
        got = os.preadv(f.fd, [memoryview(buf.data[:numel].numpy()).cast("B")], 0)
        self.files.leave(key)
        if got not in (0, numel * 4):
            self.buffers.stow(buf)
            raise SwapError(f"{key}: short read of {got}")
        if got == 0:
            buf.data[:numel].zero_()
        buf.key = key
        self.resident[key] = buf
        return buf.data[:numel]

    def swap_out(self, key, numel, dirty=True):
        buf = self.resident.pop(key)
        try:
            if dirty:
                self.write(key, buf.data[:numel])
        finally:
            self.buffers.stow(buf)

    def write(self, key, vec):
        f = self.files.enter(key)  # leak: a short write raises before leave
        put = os.pwritev(f.fd, [memoryview(vec.numpy()).cast("B")], 0)
        if put != vec.numel() * 4:
            raise SwapError(f"{key}: short write of {put}")
        self.files.leave(key)
