# TRY: self.try_lock(X)
# UNDO: self.unlock(X)
class RowLocks:
    def __init__(self):
        self._locked = set()

    def try_lock(self, row):
        if row in self._locked:
            return False
        self._locked.add(row)
        return True

    def unlock(self, row):
        self._locked.discard(row)
