"""Side streams: taken from a set, used in a `with`, given back when the work is waited for."""
import logging

LOG = logging.getLogger(__name__)


class Stream:
    def __init__(self, sid):
        self.sid = sid
        self.busy = False

    def __enter__(self):
        self.busy = True
        return self

    def __exit__(self, *exc):
        self.busy = False

    def synchronize(self):
        self.busy = False


class StreamSet:
    def __init__(self, n=4):
        self.idle = [Stream(i) for i in range(n)]

    def pick(self):
        return self.idle.pop()

    def put_down(self, stream):
        self.idle.append(stream)


class Overlap:
    def __init__(self):
        self.streams = StreamSet()
        self._copy = None
        self._compute = None

    @property
    def copy_stream(self):
        if self._copy is None:
            self._copy = self.streams.pick()  # clean: near miss, a lazy property whose stream close puts down
        return self._copy

    @property
    def compute_stream(self):
        self._compute = self._compute or self.streams.pick()  # clean: near miss, only when there is none, put down by close
        return self._compute

    def close(self):
        for name in ("_copy", "_compute"):
            stream = getattr(self, name)
            if stream is not None:
                self.streams.put_down(stream)
                setattr(self, name, None)

    def copy(self, src, dst):
        stream = self.streams.pick()  # leak: leaving its with block does not put the stream down
        with stream:
            dst[:] = src
        return len(dst)

    def copy_sync(self, src, dst):
        stream = self.streams.pick()  # clean: near miss, its with block ends, then it is put down
        with stream:
            dst[:] = src
        stream.synchronize()
        self.streams.put_down(stream)
        return len(dst)

    def copy_parts(self, parts, dst):
        used = []
        for part in parts:
            stream = self.streams.pick()  # clean: near miss, the loop over used puts each down before any return
            with stream:
                dst.extend(part)
            used.append(stream)
        for stream in used:
            stream.synchronize()
            self.streams.put_down(stream)
        if not dst:
            LOG.info("nothing copied")
            return 0
        return len(dst)

    def copy_parts_lazily(self, parts, dst):
        used = []
        for part in parts:
            stream = self.streams.pick()  # leak: synchronised at the end, but not put down
            with stream:
                dst.extend(part)
            used.append(stream)
        for stream in used:
            stream.synchronize()
        used.clear()
        return len(dst)
