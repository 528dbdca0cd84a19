"""Lock manager with the modes S and X, kept per resource and owner."""
import threading
from collections import defaultdict

COMPATIBLE = {("S", "S")}


class LockManager:
    def __init__(self):
        self.granted = defaultdict(dict)
        self.cv = threading.Condition()

    def _grantable(self, res, owner, mode):
        return all(o == owner or (m, mode) in COMPATIBLE for o, m in self.granted[res].items())

    def lock(self, owner, res, mode, timeout=1.0):
        with self.cv:
            if not self.cv.wait_for(lambda: self._grantable(res, owner, mode), timeout):
                return False
            self.granted[res][owner] = mode
            return True

    def unlock(self, owner, res):
        with self.cv:
            self.granted[res].pop(owner, None)
            self.cv.notify_all()

    def unlock_all(self, owner):
        with self.cv:
            for holders in self.granted.values():
                holders.pop(owner, None)
            self.cv.notify_all()


class Session:
    def __init__(self, manager, sid, rows):
        self.manager = manager
        self.sid = sid
        self.rows = rows

    def update_many(self, keys, fn):
        try:
            for key in keys:
                if not self.manager.lock(self.sid, key, "X"):  # clean: unlock_all in finally
                    return False
            for key in keys:
                self.rows[key] = fn(self.rows[key])
            return True
        finally:
            self.manager.unlock_all(self.sid)

    def read(self, key):
        if not self.manager.lock(self.sid, key, "S"):  # leak: an absent row returns with the shared lock
            return None
        if key not in self.rows:
            return None
        value = self.rows[key]
        self.manager.unlock(self.sid, key)
        return value

    def write(self, key, value):
        if self.manager.lock(self.sid, key, "X"):  # clean: unlocked in the same branch
            self.rows[key] = value
            self.manager.unlock(self.sid, key)

    def bump(self, key):
        self.manager.lock(self.sid, key, "X", None)  # leak: only numbers are unlocked
        if isinstance(self.rows.get(key), int):
            self.rows[key] += 1
            self.manager.unlock(self.sid, key)
