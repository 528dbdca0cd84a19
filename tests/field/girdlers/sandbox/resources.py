"""Allocators of the runner host."""
import threading
from pathlib import Path


class PortRange:
    """assign() gives a free port number, retire() makes it free again."""

    def __init__(self, first, last):
        self._free = set(range(first, last + 1))
        self._used = {}
        self._lock = threading.Lock()

    def assign(self, purpose):
        with self._lock:
            if not self._free:
                return None
            port = min(self._free)
            self._free.remove(port)
            self._used[port] = purpose
            return port

    def retire(self, port):
        with self._lock:
            self._used.pop(port, None)
            self._free.add(port)

    def assign_even(self, purpose):
        """RTP wants an even port."""
        skipped = []
        port = self.assign(purpose)  # clean: odd ones are retired from skipped, the even one is handed out
        while port is not None and port % 2:
            skipped.append(port)
            port = self.assign(purpose)  # clean: near miss, skipped in the next round or handed out
        for other in skipped:
            self.retire(other)
        return port


class WorkspaceShelf:
    """Prepared directories. check_out() hands one out; put_back() wipes it and shelves it again."""

    def __init__(self, root, count):
        self.shelf = [Path(root) / f"ws{i}" for i in range(count)]

    def check_out(self):
        return self.shelf.pop() if self.shelf else None

    def put_back(self, path):
        for child in path.glob("*"):
            child.unlink()
        self.shelf.append(path)

    def check_out_empty(self):
        """The first workspace that is really empty."""
        for _ in range(len(self.shelf)):
            path = self.check_out()  # leak: a workspace that is not empty is passed over and lost
            if path is None:
                return None
            if not any(path.glob("*")):
                return path
        return None


class Lease:
    """What a run has taken: at most one port and one workspace."""

    def __init__(self, ports, shelf):
        self.ports = ports
        self.shelf = shelf
        self.port = None
        self.path = None

    def take(self, want_port):
        self.path = self.shelf.check_out()  # leak: end() returns early for a run without a port
        if self.path is None:
            return False
        if want_port:
            self.port = self.ports.assign("run")  # clean: near miss, end retires it when there is one
        return self.port is not None or not want_port

    def end(self):
        if self.port is None:
            return
        self.ports.retire(self.port)
        self.port = None
        self.shelf.put_back(self.path)
        self.path = None
