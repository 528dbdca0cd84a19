import socket
from contextlib import contextmanager


class UplinkPool:
    def __init__(self, host, port, size):
        self.endpoint = (host, port)
        self.spare = [socket.socket() for _ in range(size)]

    def pull(self):
        return self.spare.pop()

    def push(self, sock):
        self.spare.append(sock)


@contextmanager
def uplink(pool):
    sock = pool.pull()  # clean: pushed in finally
    try:
        yield sock
    finally:
        pool.push(sock)


class Fanout:
    def __init__(self, pool):
        self.pool = pool
        self.members = set()
        self.muted = set()
        self.sent = 0

    def add(self):
        sock = self.pool.pull()  # leak: a failed send discards the socket without push
        sock.connect(self.pool.endpoint)
        self.members.add(sock)
        return sock.fileno()

    def broadcast(self, payload):
        for sock in list(self.members):
            if sock.send(payload) < len(payload):
                self.members.discard(sock)
                continue
            self.sent += 1

    def mute(self, fileno):
        for sock in self.members:
            if sock.fileno() == fileno:
                self.members.remove(sock)
                self.muted.add(sock)
                return True
        return False

    def hello(self, name):
        with uplink(self.pool) as sock:  # clean: the context manager pushes it
            sock.connect(self.pool.endpoint)
            sock.sendall(name.encode())

    def close(self):
        for sock in self.members | self.muted:
            self.pool.push(sock)
        self.members.clear()
        self.muted.clear()


class Mirror:
    def __init__(self, pool):
        self.pool = pool
        self.links = set()

    def link(self, count):
        while len(self.links) < count:
            self.links.add(self.pool.pull())  # leak: unlink takes one of the set and pushes no other

    def unlink(self):
        if self.links:
            self.pool.push(self.links.pop())
        self.links = set()
