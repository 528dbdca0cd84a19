"""Transfers between two locked accounts at a small clearing house."""


class LockTable:
    def __init__(self):
        self._held = {}

    def try_lock(self, account, owner):
        if account in self._held:
            return False
        self._held[account] = owner
        return True

    def unlock(self, account):
        self._held.pop(account, None)


class Clearing:
    def __init__(self, locks, book):
        self.locks = locks
        self.book = book
        self.conflicts = 0

    def lock_both(self, a, b, owner):
        if not self.locks.try_lock(a, owner):  # clean: unlocked when the second is refused
            return False
        if not self.locks.try_lock(b, owner):  # clean: a true result hands both to the caller
            self.locks.unlock(a)
            return False
        return True

    def lock_both_greedy(self, a, b, owner):
        first = self.locks.try_lock(a, owner)  # leak: stays locked when the second is refused
        second = self.locks.try_lock(b, owner)  # clean: unlocked, or handed on with the first
        if first and second:
            return True
        if second:
            self.locks.unlock(b)
        self.conflicts += 1
        return False

    def unlock_both(self, a, b):
        self.locks.unlock(a)
        self.locks.unlock(b)

    def transfer(self, a, b, amount, owner):
        a, b = sorted((a, b))
        if not self.lock_both(a, b, owner):  # clean: unlocked in finally
            self.conflicts += 1
            return False
        try:
            if self.book[a] < amount:
                return False
            self.book[a] -= amount
            self.book[b] += amount
            return True
        finally:
            self.unlock_both(a, b)

    def merge(self, a, b, owner):
        if not self.lock_both(a, b, owner):  # leak: an empty account returns with both locked
            return 0
        if not self.book[b]:
            return 0
        self.book[a] += self.book.pop(b)
        self.unlock_both(a, b)
        return self.book[a]

    def balance(self, a, owner):
        if self.locks.try_lock(a, owner):  # clean: unlocked after the read
            amount = self.book[a]
            self.locks.unlock(a)
            return amount
        return None
