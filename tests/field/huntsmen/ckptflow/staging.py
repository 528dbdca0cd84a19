"""Host memory for tensors on their way out; a buffer is a set of equal chunks."""
import math
import threading

CHUNK = 8 << 20


class StagingClosed(RuntimeError):
    pass


class StagedBuffer:
    def __init__(self, area, chunks, nbytes):
        self.area = area
        self.chunks = chunks
        self.nbytes = nbytes

    def fill(self, raw):
        for i, chunk in enumerate(self.chunks):
            piece = raw[i * CHUNK:(i + 1) * CHUNK]
            chunk[:len(piece)] = piece

    def parts(self):
        left = self.nbytes
        for chunk in self.chunks:
            yield memoryview(chunk)[:min(CHUNK, left)]
            left -= CHUNK

    def shrink(self, nbytes):
        """Give back the chunks that compression has made unnecessary."""
        keep = math.ceil(nbytes / CHUNK)
        spare, self.chunks = self.chunks[keep:], self.chunks[:keep]
        self.nbytes = nbytes
        self.area.restore(spare)

    def release(self):
        chunks, self.chunks = self.chunks, []
        self.area.restore(chunks)


class StagingArea:
    def __init__(self, total_bytes):
        self._free = [bytearray(CHUNK) for _ in range(total_bytes // CHUNK)]
        self._cv = threading.Condition()
        self._closed = False
        self.stalls = 0

    def reserve(self, nbytes):
        need = math.ceil(nbytes / CHUNK)
        chunks = []
        with self._cv:
            while len(chunks) < need:
                if self._closed:
                    raise StagingClosed()
                if not self._free:
                    self.stalls += 1
                    self._cv.wait()
                    continue
                chunks.append(self._free.pop())  # leak: closing while a buffer is half collected raises and loses its chunks
        return StagedBuffer(self, chunks, nbytes)

    def try_reserve(self, nbytes):
        need = math.ceil(nbytes / CHUNK)
        with self._cv:
            if self._closed or len(self._free) < need:
                return None
            chunks = [self._free.pop() for _ in range(need)]  # clean: the room was checked, the buffer owns them
        return StagedBuffer(self, chunks, nbytes)

    def restore(self, chunks):
        with self._cv:
            self._free.extend(chunks)
            self._cv.notify_all()

    def close(self):
        with self._cv:
            self._closed = True
            self._cv.notify_all()
