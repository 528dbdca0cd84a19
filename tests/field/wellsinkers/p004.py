"""Disk space set aside before an upload, then committed or cancelled."""
import itertools


class SpaceLedger:
    def __init__(self, capacity):
        self.capacity = capacity
        self.committed = 0
        self._pending = {}
        self._ids = itertools.count(1)

    def free_space(self):
        return self.capacity - self.committed - sum(self._pending.values())

    def set_aside(self, size):
        if size > self.free_space():
            return None
        ticket = next(self._ids)
        self._pending[ticket] = size
        return ticket

    def commit(self, ticket, actual):
        self._pending.pop(ticket)
        self.committed += actual

    def cancel(self, ticket):
        self._pending.pop(ticket, None)


class Uploader:
    def __init__(self, ledger, store):
        self.ledger = ledger
        self.store = store

    def put(self, name, data):
        ticket = self.ledger.set_aside(len(data))  # clean: committed or cancelled
        if ticket is None:
            return False
        if self.store.write(name, data):
            self.ledger.commit(ticket, len(data))
            return True
        self.ledger.cancel(ticket)
        return False

    def put_once(self, name, data):
        ticket = self.ledger.set_aside(len(data))  # leak: neither end when the name exists
        if ticket is None:
            return False
        if self.store.exists(name):
            return False
        self.store.write(name, data)
        self.ledger.commit(ticket, len(data))
        return True

    def start(self, size):
        return self.ledger.set_aside(size)  # clean: handed to the caller

    def put_parts(self, name, parts):
        ticket = self.start(sum(map(len, parts)))  # leak: no cancel when a part fails
        if ticket is None:
            return 0
        written = 0
        for part in parts:
            if not self.store.append(name, part):
                return written
            written += len(part)
        self.ledger.commit(ticket, written)
        return written
