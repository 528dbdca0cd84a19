"""Keyed locks on stripes; try_lock says yes or no."""
import threading


class StripedLocks:
    def __init__(self, stripes=64):
        self._holders = [None] * stripes
        self._guard = threading.Lock()

    def _stripe(self, key):
        return hash(key) % len(self._holders)

    def try_lock(self, key):
        i = self._stripe(key)
        with self._guard:
            if self._holders[i] is not None:
                return False
            self._holders[i] = key
            return True

    def unlock(self, key):
        i = self._stripe(key)
        with self._guard:
            if self._holders[i] == key:
                self._holders[i] = None


class Wallets:
    def __init__(self, locks, ledger):
        self.locks = locks
        self.ledger = ledger

    def withdraw(self, wallet, amount):
        if not self.locks.try_lock(wallet):  # leak: too little money leaves it locked
            return "busy"
        if self.ledger[wallet] < amount:
            return "poor"
        self.ledger[wallet] -= amount
        self.locks.unlock(wallet)
        return "ok"

    def deposit(self, wallet, amount):
        if not self.locks.try_lock(wallet):  # clean: unlocked in finally
            return "busy"
        try:
            self.ledger[wallet] += amount
            return "ok"
        finally:
            self.locks.unlock(wallet)

    def freeze(self, wallet):
        return self.locks.try_lock(wallet)  # clean: handed to the caller, see thaw

    def thaw(self, wallet):
        self.locks.unlock(wallet)


def audit(wallets):
    total = 0
    for wallet, money in wallets.ledger.items():
        if not wallets.locks.try_lock(wallet):  # leak: empty wallets stay locked
            continue
        if money:
            total += money
            wallets.locks.unlock(wallet)
    return total
