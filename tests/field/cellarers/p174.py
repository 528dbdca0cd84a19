"""Fixed set of ledger connections in a queue of empty places, opened on first use."""
import queue
import socket


class LazyLinks:
    def __init__(self, address, size=6):
        self.address = address
        self._q = queue.LifoQueue(size)
        for _ in range(size):
            self._q.put(None)

    def pull(self, timeout=3.0):
        link = self._q.get(timeout=timeout)
        if link is None:
            link = socket.create_connection(self.address)
        return link

    def push(self, link):
        self._q.put_nowait(link)

    def push_broken(self, link):
        link.close()
        self._q.put_nowait(None)


class Ledger:
    def __init__(self, links):
        self.links = links

    def post(self, line):
        link = self.links.pull()  # clean: pushed as broken after an error, pushed otherwise
        try:
            link.sendall(line)
            answer = link.recv(64)
        except OSError:
            self.links.push_broken(link)
            return None
        self.links.push(link)
        return answer

    def balance(self, account):
        try:
            link = self.links.pull(0.5)  # leak: an account not found returns without a push
        except queue.Empty:
            return None
        link.sendall(b"BAL " + account)
        answer = link.recv(64)
        if answer == b"NOTFOUND":
            return None
        self.links.push(link)
        return int(answer)

    def replay(self, lines):
        link = self.links.pull()  # clean: one link for all lines
        for line in lines:
            link.sendall(line)
        self.links.push(link)

    def quit_all(self, n):
        for _ in range(n):
            link = self.links.pull()  # leak: closed without giving the place back to the queue
            link.sendall(b"QUIT")
            link.close()
