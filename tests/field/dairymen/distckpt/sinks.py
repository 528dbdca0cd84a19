"""Where bytes go.  A sink is shared by the writers of one file."""
import os
import threading


class SinkFailed(Exception):
    pass


class FileSink:
    def __init__(self, path):
        self.path = path
        self.part = path + ".part"
        self._f = open(self.part, "wb")  # clean: commit() or discard() close it
        self.users = 0

    def append(self, view):
        try:
            at = self._f.tell()
            self._f.write(view)
        except OSError as exc:
            raise SinkFailed(f"{self.path}: {exc}") from exc
        return at

    def commit(self):
        self._f.flush()
        os.fsync(self._f.fileno())
        self._f.close()
        os.replace(self.part, self.path)

    def discard(self):
        self._f.close()
        os.unlink(self.part)


class SinkTable:
    """attach() opens the sink or joins it, detach() commits with the last user."""

    def __init__(self, root):
        self.root = root
        self._sinks = {}
        self._lock = threading.Lock()

    def attach(self, name):
        with self._lock:
            sink = self._sinks.get(name)
            if sink is None:
                sink = FileSink(os.path.join(self.root, name))  # clean: near miss, in the table until the last detach() or discard_all()
                self._sinks[name] = sink
            sink.users += 1
            return sink

    def detach(self, name):
        with self._lock:
            sink = self._sinks[name]
            sink.users -= 1
            if sink.users == 0:
                del self._sinks[name]
                sink.commit()

    def attach_new(self, name):
        """For a file that must not exist; None when it does."""
        sink = self.attach(name)  # leak: for an existing file None is returned after the user was counted
        if os.path.exists(sink.path):
            return None
        return sink

    def discard_all(self):
        with self._lock:
            while self._sinks:
                _, sink = self._sinks.popitem()
                sink.discard()
