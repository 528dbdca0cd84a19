# take: P.begin_io()
# give: P.end_io()
# gets: nothing
import threading


class Pool:
    def __init__(self):
        self._mutex = threading.Lock()

    def begin_io(self):
        self._mutex.acquire()

    def end_io(self):
        self._mutex.release()
