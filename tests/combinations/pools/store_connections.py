# take: P.dial()
# give: P.hangup(X)
# gets: value
# type: Switchboard
import queue
import socket


class Switchboard:
    """Keep-alive connections to the remote KV store (blocking; at most `lines` of them)."""

    def __init__(self, host, port, lines=8, timeout=30.0):
        self._addr = (host, port)
        self._timeout = timeout
        self._q = queue.LifoQueue(lines)
        for _ in range(lines):
            self._q.put(None)  # placeholder: not connected yet

    def dial(self):
        sock = self._q.get(timeout=self._timeout)  # queue.Empty if all lines stay busy
        if sock is not None:
            return sock
        try:
            sock = socket.create_connection(self._addr, timeout=self._timeout)
        except BaseException:
            self._q.put(None)
            raise
        return sock

    def hangup(self, sock):
        self._q.put(None if sock.fileno() < 0 else sock)
