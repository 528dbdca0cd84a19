"""Loopback ports, one for the control channel of each sandbox."""
import threading


class NoPorts(RuntimeError):
    pass


class PortRange:
    def __init__(self, first: int, last: int) -> None:
        self._free = set(range(first, last + 1))
        self._lock = threading.Lock()

    def claim(self) -> int:
        with self._lock:
            if not self._free:
                raise NoPorts("every port of the range is in use")
            return self._free.pop()  # clean: returned

    def free(self, port: int) -> None:
        with self._lock:
            self._free.add(port)
