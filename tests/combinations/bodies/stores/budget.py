# CHARGE: self.left -= X
# REFUND: self.left += X
# SHORT: X > self.left
# TRY: self.take(X)
# UNDO: self.give(X)
import threading


class Budget:
    def __init__(self, total: int):
        self.total = total
        self.left = total
        self._mu = threading.Lock()

    def take(self, n: int) -> bool:
        if n > self.left:
            return False
        self.left -= n
        return True

    def give(self, n: int) -> None:
        self.left += n
