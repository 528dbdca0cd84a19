"""Free space of the volume. An extent is the number of a block of EXTENT bytes."""
import logging
import os
import threading

logger = logging.getLogger("blobcache.extents")

EXTENT = 4 << 20


class VolumeFull(Exception):
    pass


class ExtentMap:
    def __init__(self, volume_file, total_bytes):
        self._fd = volume_file.fileno()
        self._free = list(range(total_bytes // EXTENT))
        self._mutex = threading.Lock()

    def take(self, nbytes):
        count = -(-nbytes // EXTENT)
        with self._mutex:
            if len(self._free) < count:
                raise VolumeFull(f"{count} extents wanted, {len(self._free)} free")
            extents = [self._free.pop() for _ in range(count)]  # clean: counted before, returned to the caller
        return extents

    def take_contiguous(self, nbytes):
        """For direct io. Falls back to scattered extents."""
        count = -(-nbytes // EXTENT)
        run = []
        with self._mutex:
            for extent in sorted(self._free):
                if run and extent != run[-1] + 1:
                    run = []
                run.append(extent)
                if len(run) == count:
                    self._free = [e for e in self._free if e not in run]
                    return run
        logger.debug("no run of %d extents", count)
        return self.take(nbytes)  # clean: returned to the caller

    def put(self, extents):
        with self._mutex:
            self._free.extend(extents)

    def write(self, extents, data):
        for i, extent in enumerate(extents):
            os.pwrite(self._fd, data[i * EXTENT:(i + 1) * EXTENT], extent * EXTENT)

    def read(self, extents, offset, length):
        out = bytearray()
        while length > 0:
            index, inner = divmod(offset, EXTENT)
            piece = os.pread(self._fd, min(length, EXTENT - inner), extents[index] * EXTENT + inner)
            if not piece:
                break
            out += piece
            offset, length = offset + len(piece), length - len(piece)
        return bytes(out)
