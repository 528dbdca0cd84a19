# take: P.hold_engine()
# give: P.let_engine_go(X)
# gets: optional
class Engine:
    def __init__(self, number):
        self.number = number
        self.busy = False


class Pool:
    def __init__(self, count):
        self._engines = [Engine(i) for i in range(count)]
        self._lock = threading.Lock()

    def hold_engine(self):
        with self._lock:
            engine = next((each for each in self._engines if not each.busy), None)
            if engine is None:
                return None
            engine.busy = True
            return engine

    def let_engine_go(self, engine):
        with self._lock:
            engine.busy = False
