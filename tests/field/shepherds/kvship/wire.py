"""Connections to peers, one a peer, made on demand and counted."""
import logging
import socket
import threading

log = logging.getLogger("kvship.wire")


class PeerGone(ConnectionError):
    pass


class Wire:
    def __init__(self, port):
        self.port = port
        self._lock = threading.Lock()
        self._links = {}

    def open(self, peer):
        """Socket to the peer; every open() wants a done()."""
        with self._lock:
            entry = self._links.get(peer)
            if entry is None:
                entry = [self._connect(peer), 0]  # clean: stored in the links table, done() closes at zero
                self._links[peer] = entry
            entry[1] += 1
            return entry[0]

    def _connect(self, peer):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)  # leak: PeerGone is raised with the socket open
        try:
            sock.connect((peer, self.port))
        except OSError as exc:
            raise PeerGone(f"{peer}: {exc}") from exc
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def done(self, peer):
        with self._lock:
            entry = self._links[peer]
            entry[1] -= 1
            if entry[1] == 0:
                del self._links[peer]
                entry[0].close()

    def send(self, sock, header, region):
        try:
            sock.sendall(header)
            sock.sendall(region.rkey.to_bytes(8, "little"))
        except OSError as exc:
            raise PeerGone(str(exc)) from exc
