"""Links to shard servers.

For every shard there is a bag of tokens, one per link that may exist. Whoever has a link has its token too:
`checkout` takes both, `restore` and `destroy` bring the token back.
"""
import logging
import queue
import socket
import struct
import threading
import time

log = logging.getLogger(__name__)


class ShardDown(Exception):
    pass


class WrongShard(ShardDown):
    """The server behind the address holds another shard by now."""


class Link:
    def __init__(self, sock, shard):
        self.sock = sock
        self.shard = shard
        self.epoch = 0
        self.used = time.monotonic()

    def hello(self):
        self.sock.sendall(b"HELO")
        got, self.epoch = struct.unpack("<II", self.sock.recv(8))
        return got == self.shard

    def query(self, payload):
        self.sock.sendall(struct.pack("<I", len(payload)) + payload)
        self.used = time.monotonic()

    def receive_into(self, view):
        (size,) = struct.unpack("<I", self.sock.recv(4, socket.MSG_WAITALL))
        if size > len(view):
            raise ShardDown(f"shard {self.shard} wants to send {size} bytes")
        return self.sock.recv_into(view, size, socket.MSG_WAITALL)

    def hangup(self):
        self.sock.close()


class LinkPool:
    def __init__(self, addresses, per_shard=8):
        self.addresses = addresses
        self._tokens = {}
        self._idle = {}
        self._mutex = threading.Lock()
        for shard in addresses:
            self._tokens[shard] = queue.Queue()
            self._idle[shard] = []
            for n in range(per_shard):
                self._tokens[shard].put(n)

    def checkout(self, shard, timeout=0.5):
        try:
            token = self._tokens[shard].get(timeout=timeout)  # leak: WrongShard from the greeting of a new link leaves without the token being put back
        except queue.Empty:
            raise ShardDown(f"no link to shard {shard} in {timeout}s") from None
        with self._mutex:
            link = self._idle[shard].pop() if self._idle[shard] else None  # clean: returned with the token
        if link is None:
            try:
                link = self._dial(shard)  # clean: returned, on the OSError there is none
            except OSError as exc:
                self._tokens[shard].put(token)
                raise ShardDown(str(exc)) from exc
        link.token = token
        return link

    def _dial(self, shard):
        sock = socket.create_connection(self.addresses[shard], timeout=1.0)  # clean: near miss, hung up on both exceptions, otherwise returned in the link
        link = Link(sock, shard)
        try:
            right = link.hello()
        except OSError:
            link.hangup()
            raise
        if not right:
            link.hangup()
            raise WrongShard(f"{self.addresses[shard]} is not shard {shard}")
        return link

    def restore(self, link):
        with self._mutex:
            self._idle[link.shard].append(link)
        self._tokens[link.shard].put(link.token)

    def destroy(self, link):
        link.hangup()
        self._tokens[link.shard].put(link.token)

    def fresh(self, shard, epoch):
        """A link whose server has at least the given epoch."""
        link = self.checkout(shard)  # clean: near miss, destroyed before the name is bound again, returned in the end
        tries = 0
        while link.epoch < epoch and tries < 3:
            self.destroy(link)
            link = self.checkout(shard)  # clean: near miss, as above, bound to the name after the older one was destroyed
            tries += 1
        return link

    def reap(self, max_idle):
        horizon = time.monotonic() - max_idle
        with self._mutex:
            for shard, links in self._idle.items():
                for link in [l for l in links if l.used < horizon]:
                    links.remove(link)
                    link.hangup()
