"""Transaction ids of a tiny store: begun, then committed or rolled back."""


class Store:
    def __init__(self):
        self.data = {}
        self._xids = {}
        self._last = 0

    def begin(self):
        self._last += 1
        self._xids[self._last] = {}
        return self._last

    def write(self, xid, key, value):
        self._xids[xid][key] = value

    def read(self, xid, key):
        return self._xids[xid].get(key, self.data.get(key))

    def commit(self, xid):
        self.data.update(self._xids.pop(xid))

    def rollback(self, xid):
        self._xids.pop(xid, None)

    def horizon(self):
        return min(self._xids, default=self._last + 1)


class Bank:
    def __init__(self, store):
        self.store = store
        self.xid = None

    def transfer(self, src, dst, amount):
        xid = self.store.begin()  # clean: committed or rolled back
        left = self.store.read(xid, src) - amount
        if left < 0:
            self.store.rollback(xid)
            return False
        self.store.write(xid, src, left)
        self.store.write(xid, dst, self.store.read(xid, dst) + amount)
        self.store.commit(xid)
        return True

    def open_account(self, name):
        xid = self.store.begin()  # leak: a known name ends in neither way
        if self.store.read(xid, name) is not None:
            return False
        self.store.write(xid, name, 0)
        self.store.commit(xid)
        return True

    def start_batch(self):
        self.xid = self.store.begin()  # clean: stored, committed by end_batch

    def end_batch(self):
        self.store.commit(self.xid)
        self.xid = None


def balance(store, name):
    xid = store.begin()  # leak: read transactions are begun and not ended
    return store.read(xid, name)
