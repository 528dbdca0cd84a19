import logging

from .sender import HEAD

log = logging.getLogger("weightcast.recv")


class EndOfStream(Exception):
    pass


class Receiver:
    """Collects the parts of one version; install() gets them when all are there."""

    def __init__(self, sock, arena, names, install):
        self.sock = sock
        self.arena = arena
        self.names = set(names)
        self.install = install
        self.number = 0
        self.parts = {}
        self.scratch = arena.checkout(arena.small_size)  # clean: for heads and names, checked in by close()

    def _exactly(self, view):
        while view:
            count = self.sock.recv_into(view)
            if count == 0:
                raise EndOfStream()
            view = view[count:]

    def _restart(self, number):
        log.info("version %d, %d parts of %d are out of date", number, len(self.parts), self.number)
        self.number = number
        self.parts = {}

    def receive_one(self):
        head = memoryview(self.scratch.data)[:HEAD.size]
        self._exactly(head)
        number, name_len, nbytes = HEAD.unpack(head)
        raw = memoryview(self.scratch.data)[:name_len]
        self._exactly(raw)
        name = bytes(raw).decode()
        if number != self.number:
            self._restart(number)
        block = self.arena.checkout(nbytes)  # leak: _restart() for a new version replaces the table of parts and does not check them in
        block.name = name
        block.used = nbytes
        old = self.parts.get(name)
        self.parts[name] = block
        if old is not None:
            self.arena.checkin(old)
        self._exactly(block.view())
        if self.names <= set(self.parts):
            self._complete()

    def _complete(self):
        self.install(self.number, {name: b.view() for name, b in self.parts.items()})
        while self.parts:
            self.arena.checkin(self.parts.popitem()[1])

    def save(self, path, name):
        """Copy of one part on disk, for bug reports."""
        part = self.parts.get(name)
        if part is None:
            return False
        copy = self.arena.checkout(part.used)  # leak: a write that fails returns False before the check-in
        copy.fill(name, part.view())
        try:
            with open(path, "wb") as out:  # clean: closed by the with statement
                out.write(copy.view())
        except OSError as exc:
            log.warning("%s: %s", path, exc)
            return False
        self.arena.checkin(copy)
        return True

    def serve(self):
        try:
            while True:
                self.receive_one()
        except EndOfStream:
            log.info("sender is gone")
        finally:
            self.close()

    def close(self):
        if self.scratch is not None:
            self.arena.checkin(self.scratch)
            self.scratch = None
        while self.parts:
            self.arena.checkin(self.parts.popitem()[1])
