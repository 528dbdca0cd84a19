"""Block bitmap of a disk image, a byte for eight blocks."""


class BlockBitmap:
    def __init__(self, blocks):
        self.map = bytearray((blocks + 7) // 8)
        self.blocks = blocks
        self.hint = 0

    def _test(self, b):
        return self.map[b >> 3] & (1 << (b & 7))

    def balloc(self):
        for step in range(self.blocks):
            b = (self.hint + step) % self.blocks
            if not self._test(b):
                self.map[b >> 3] |= 1 << (b & 7)
                self.hint = b + 1
                return b
        return -1

    def bfree(self, b):
        self.map[b >> 3] &= ~(1 << (b & 7)) & 0xFF
        self.hint = min(self.hint, b)


class Image:
    def __init__(self, bitmap, dev):
        self.bitmap = bitmap
        self.dev = dev
        self.files = {}

    def append(self, name, data):
        b = self.bitmap.balloc()  # clean: entered in the file's list, freed by remove()
        if b < 0:
            return False
        self.dev.write(b, data)
        self.files.setdefault(name, []).append(b)
        return True

    def remove(self, name):
        for b in self.files.pop(name, []):
            self.bitmap.bfree(b)

    def append_small(self, name, data):
        b = self.bitmap.balloc()  # leak: a full file returns with the block neither listed nor freed
        if b < 0:
            return False
        if len(self.files.get(name, ())) >= 12:
            return False
        self.dev.write(b, data)
        self.files.setdefault(name, []).append(b)
        return True

    def bounce(self, src, transform):
        tmp = self.bitmap.balloc()  # clean: freed in finally
        if tmp == -1:
            return None
        try:
            self.dev.write(tmp, transform(self.dev.read(src)))
            return self.dev.read(tmp)
        finally:
            self.bitmap.bfree(tmp)

    def sort_runs(self, runs):
        for run in runs:
            spill = self.bitmap.balloc()  # leak: the spill blocks of the loop are never freed
            self.dev.write(spill, sorted(run))
