# take: P.down()
# give: P.up()
# gets: nothing
import threading


class Pool:
    def __init__(self, n):
        self._n = n
        self._cond = threading.Condition()

    def down(self):
        with self._cond:
            while self._n == 0:
                self._cond.wait()
            self._n -= 1

    def up(self):
        with self._cond:
            self._n += 1
            self._cond.notify()
