"""Two allocators: a credit of bytes that may be in flight, and a table of chunk buffers."""
import threading
from contextlib import ExitStack, contextmanager


class Credit:
    """Bytes allowed in flight. draw() takes, settle() returns the same amount."""

    def __init__(self, total):
        self.total = total
        self.left = total
        self._cv = threading.Condition()

    def draw(self, amount):
        amount = min(amount, self.total)
        with self._cv:
            self._cv.wait_for(lambda: self.left >= amount)
            self.left -= amount
        return amount

    def draw_if(self, amount):
        """The amount when it is available now, otherwise 0 and nothing is taken."""
        with self._cv:
            if self.left < amount:
                return 0
            self.left -= amount
            return amount

    def settle(self, amount):
        with self._cv:
            self.left += amount
            self._cv.notify_all()


class ChunkTable:
    def __init__(self, count, size):
        self.size = size
        self.rows = [bytearray(size) for _ in range(count)]
        self.state = [False] * count
        self._lock = threading.Lock()

    def grab(self):
        """Index of a free row, -1 when all are taken."""
        with self._lock:
            for index, taken in enumerate(self.state):
                if not taken:
                    self.state[index] = True
                    return index
        return -1

    def release(self, index):
        with self._lock:
            self.state[index] = False

    def grab_run(self, length):
        """`length` rows at once or an empty list."""
        got = []
        for _ in range(length):
            index = self.grab()  # leak: when a row is missing, the ones in got are not released
            if index < 0:
                return []
            got.append(index)
        return got

    def grab_pair(self):
        first = self.grab()  # clean: released when there is no second, else handed out
        second = self.grab()  # clean: -1 is checked, else handed out
        if second < 0:
            if first >= 0:
                self.release(first)
            return None
        return first, second

    @contextmanager
    def rows_for(self, count):
        with ExitStack() as stack:
            rows = []
            for _ in range(count):
                index = self.grab()  # clean: registered on the stack, which releases it
                if index < 0:
                    break
                stack.callback(self.release, index)
                rows.append(index)
            yield rows
