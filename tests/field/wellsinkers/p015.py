"""Keep-alive sockets, kept per host."""
import socket
from collections import defaultdict, deque
from contextlib import contextmanager


class KeepAlive:
    def __init__(self, per_host=4):
        self.per_host = per_host
        self._idle = defaultdict(deque)
        self._busy = defaultdict(int)

    def dial(self, host, port=80):
        key = (host, port)
        sock = self._idle[key].pop() if self._idle[key] else socket.create_connection(key)
        self._busy[key] += 1
        return sock

    def hang_up(self, host, sock, port=80, reusable=True):
        key = (host, port)
        self._busy[key] -= 1
        if reusable and len(self._idle[key]) < self.per_host:
            self._idle[key].append(sock)
        else:
            sock.close()

    @contextmanager
    def line(self, host, port=80):
        sock = self.dial(host, port)
        try:
            yield sock
        finally:
            self.hang_up(host, sock, port)


def head(pool, host, path):
    with pool.line(host) as sock:  # clean: with
        sock.sendall(f"HEAD {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        return sock.recv(4096)


def fetch(pool, host, path):
    sock = pool.dial(host)  # leak: an empty answer returns with the socket
    sock.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    first = sock.recv(65536)
    if not first:
        return b""
    pool.hang_up(host, sock)
    return first


def ping_all(pool, hosts):
    for host in hosts:
        sock = pool.dial(host)  # clean: hung up each time round
        sock.sendall(b"PING\r\n")
        pool.hang_up(host, sock, reusable=sock.recv(4) == b"PONG")


def reconnect(pool, host):
    sock = pool.dial(host)  # leak: overwritten by the second dial
    if sock.getpeername()[1] != 80:
        sock = pool.dial(host)  # clean: hung up below
    pool.hang_up(host, sock)
