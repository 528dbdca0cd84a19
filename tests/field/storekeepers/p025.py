import threading
from collections import defaultdict


class LockManager:
    def __init__(self):
        self._guard = threading.Lock()
        self._owners = {}

    def lock(self, key, txn):
        with self._guard:
            if self._owners.get(key, txn) != txn:
                return False
            self._owners[key] = txn
            return True

    def unlock(self, key, txn):
        with self._guard:
            if self._owners.get(key) == txn:
                del self._owners[key]


class Transactions:
    def __init__(self, manager):
        self.manager = manager
        self.held = defaultdict(list)
        self.savepoints = {}
        self.undo = defaultdict(list)

    def write(self, txn, key, table, value):
        if key not in self.held[txn]:
            if not self.manager.lock(key, txn):  # leak: rollback_to truncates the list without unlock
                return False
            self.held[txn].append(key)
        self.undo[txn].append((key, table.get(key)))
        table[key] = value
        return True

    def savepoint(self, txn):
        self.savepoints[txn] = (len(self.held[txn]), len(self.undo[txn]))

    def rollback_to(self, txn, table):
        mark, undo_mark = self.savepoints.pop(txn)
        while len(self.undo[txn]) > undo_mark:
            key, old = self.undo[txn].pop()
            table[key] = old
        self.held[txn] = self.held[txn][:mark]

    def commit(self, txn):
        for key in self.held.pop(txn, []):
            self.manager.unlock(key, txn)
        self.undo.pop(txn, None)
        self.savepoints.pop(txn, None)


class SchemaGuard:
    def __init__(self, manager):
        self.manager = manager
        self.names = set()
        self.migrating = None

    def freeze(self, name):
        if name in self.names:
            return True
        if self.manager.lock(("schema", name), "ddl"):  # clean: thaw unlocks every name
            self.names.add(name)
        return name in self.names

    def thaw(self):
        while self.names:
            self.manager.unlock(("schema", self.names.pop()), "ddl")

    def migrate(self, name):
        if self.migrating is None and self.manager.lock(("migration", name), "ddl"):  # leak: done forgets
            self.migrating = name
        return self.migrating == name

    def done(self, version):
        name, self.migrating = self.migrating, None
        return name, version + 1

    def inspect(self, name, read):
        if not self.manager.lock(("schema", name), "dml"):  # clean: unlocked below
            return None
        columns = read(name)
        self.manager.unlock(("schema", name), "dml")
        return columns
