"""Transaction slots of an embedded key-value engine."""
ACTIVE, DONE = 1, 0


class TxnTable:
    def __init__(self, store, slots=32):
        self.store = store
        self.status = [DONE] * slots
        self.writes = [None] * slots

    def begin(self):
        slot = self.status.index(DONE)
        self.status[slot] = ACTIVE
        self.writes[slot] = {}
        return slot

    def put(self, slot, key, value):
        self.writes[slot][key] = value

    def get(self, slot, key):
        return self.writes[slot].get(key, self.store.get(key))

    def commit(self, slot):
        self.store.update(self.writes[slot])
        self._end(slot)

    def abort(self, slot):
        self._end(slot)

    def _end(self, slot):
        self.writes[slot] = None
        self.status[slot] = DONE


class Bank:
    def __init__(self, txns):
        self.txns = txns

    def transfer(self, src, dst, amount):
        t = self.txns.begin()  # clean: committed or aborted on both branches
        if self.txns.get(t, src) < amount:
            self.txns.abort(t)
            return False
        self.txns.put(t, src, self.txns.get(t, src) - amount)
        self.txns.put(t, dst, self.txns.get(t, dst) + amount)
        self.txns.commit(t)
        return True

    def withdraw(self, acct, amount):
        t = self.txns.begin()  # leak: neither committed nor aborted when the balance is short
        balance = self.txns.get(t, acct)
        if balance >= amount:
            self.txns.put(t, acct, balance - amount)
            self.txns.commit(t)
            return True
        return False

    def balance(self, acct):
        t = self.txns.begin()  # leak: the read-only transaction is never ended
        return self.txns.get(t, acct)

    def open_account(self, acct):
        t = self.txns.begin()  # clean: commit on success, abort on any exception
        try:
            self.txns.put(t, acct, 0)
        except Exception:
            self.txns.abort(t)
            raise
        self.txns.commit(t)
