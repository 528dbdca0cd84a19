import logging
import socket
import struct
import threading

from .arena import ArenaBusy

log = logging.getLogger("weightcast")

HEAD = struct.Struct("<IHI")


class Refused(ConnectionError):
    pass


def send_block(sock, number, block):
    name = block.name.encode()
    sock.sendall(HEAD.pack(number, len(name), block.used) + name)
    sock.sendall(block.view())


class Link(threading.Thread):
    """The way to one engine. Only the newest version is worth sending."""

    def __init__(self, book, sock, name):
        super().__init__(name="link-" + name, daemon=True)
        self.book = book
        self.sock = sock
        self.pending = None
        self.wake = threading.Condition()
        self.stopping = False
        self.broken = False

    @classmethod
    def open(cls, book, host, port):
        sock = socket.create_connection((host, port), timeout=20)  # clean: near miss, closed when refused, else by the thread of the link
        sock.sendall(b"WCST")
        if sock.recv(2) != b"OK":
            sock.close()
            raise Refused("%s:%d" % (host, port))
        link = cls(book, sock, host)
        link.start()
        return link

    def offer(self, version):
        with self.wake:
            self.pending = version
            self.wake.notify()

    def run(self):
        while True:
            with self.wake:
                self.wake.wait_for(lambda: self.pending is not None or self.stopping)
                version, self.pending = self.pending, None
            if version is None:
                break
            try:
                for block in version.blocks:
                    send_block(self.sock, version.number, block)
            except OSError as exc:
                log.warning("%s: %s", self.name, exc)
                self.broken = True
            finally:
                self.book.drop(version)
        self.sock.close()

    def stop(self):
        with self.wake:
            self.stopping = True
            self.wake.notify()
        self.join()


class Sender:
    def __init__(self, arena, book):
        self.arena = arena
        self.book = book
        self.links = []

    def add(self, host, port):
        try:
            link = Link.open(self.book, host, port)  # clean: near miss, nothing is open after a refusal, stop_all() stops the rest
        except Refused as exc:
            log.info("not added: %s", exc)
            return False
        self.links.append(link)
        return True

    def collect(self, state):
        """The tensors of a state dict, copied into blocks."""
        blocks = []
        for name, tensor in state.items():
            data = tensor.cpu().contiguous().numpy().tobytes()
            block = self.arena.checkout(len(data))  # leak: ArenaBusy passes publish() by with the blocks before in the list
            block.fill(name, data)
            blocks.append(block)
        return blocks

    def publish(self, state):
        try:
            blocks = self.collect(state)  # clean: near miss, the version owns them and the book checks them in
        except ArenaBusy as exc:
            log.warning("step is not published: %s", exc)
            return None
        number = self.book.publish(blocks)
        self.broadcast()
        return number

    def broadcast(self):
        for link in self.links:
            if link.broken:
                continue
            version = self.book.hold_latest()  # leak: offer() overwrites a pending version, whose reference nobody drops
            if version is not None:
                link.offer(version)

    def changed_names(self, since):
        """Names of the tensors that differ from an older version; None when that is gone."""
        new = self.book.hold_latest()  # leak: when the older version is gone this one is still held
        if new is None:
            return None
        old = self.book.hold(since)  # clean: dropped at the end, None needs nothing
        if old is None:
            return None
        before = {b.name: bytes(b.view()) for b in old.blocks}
        names = [b.name for b in new.blocks if before.get(b.name) != bytes(b.view())]
        self.book.drop(old)
        self.book.drop(new)
        return names

    def latest_size(self):
        version = self.book.hold_latest()  # clean: dropped unless it is None
        if version is None:
            return 0
        size = version.nbytes()
        self.book.drop(version)
        return size

    def stop_all(self):
        while self.links:
            self.links.pop().stop()
        self.book.close()
