"""Shared-memory segments between the tokenizer and the engine processes."""


class SegmentTable:
    def __init__(self, prefix):
        self.prefix = prefix
        self._next = 0
        self._alive = {}

    def create(self, size):
        name = f"{self.prefix}{self._next}"
        self._next += 1
        self._alive[name] = bytearray(size)
        return name

    def destroy(self, name):
        self._alive.pop(name, None)

    def view(self, name):
        return memoryview(self._alive[name])


class Mailbox:
    """A segment is created by the writer and destroyed by whoever reads the message."""

    def __init__(self, table):
        self.table = table
        self._inbox = []

    def post(self, payload):
        name = self.table.create(len(payload))  # clean: near miss, in the inbox until a reader destroys it
        self.table.view(name)[:] = payload
        self._inbox.append((name, len(payload)))

    def receive(self):
        if not self._inbox:
            return None
        name, size = self._inbox.pop(0)
        data = bytes(self.table.view(name)[:size])
        self.table.destroy(name)
        return data

    def broadcast(self, payload, readers):
        if not readers:
            return 0
        name = self.table.create(len(payload))  # clean: near miss, destroyed after the loop and on the break
        self.table.view(name)[:] = payload
        done = 0
        for reader in readers:
            if not reader(name):
                break
            done += 1
        self.table.destroy(name)
        return done

    def roundtrip(self, payload, kind):
        name = self.table.create(len(payload))  # leak: an unknown kind falls through without destroying
        self.table.view(name)[:] = payload
        if kind == "copy":
            out = bytes(self.table.view(name))
            self.table.destroy(name)
        elif kind == "hash":
            out = hash(bytes(self.table.view(name)))
            self.table.destroy(name)
        else:
            out = None
        return out

    def stage(self, parts):
        names = [self.table.create(len(p)) for p in parts]  # leak: the first one is skipped when destroying
        total = sum(len(self.table.view(n)) for n in names)
        for name in names[1:]:
            self.table.destroy(name)
        return total
