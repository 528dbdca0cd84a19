# take: P.begin()
# give: P.finish()
# gets: nothing
class Pool:
    def __init__(self):
        self._running = 0
        self._idle = threading.Event()

    def begin(self):
        self._running += 1
        self._idle.clear()

    def finish(self):
        self._running -= 1
        if self._running == 0:
            self._idle.set()
