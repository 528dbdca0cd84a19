"""Config watches: adding one gives back the function that cancels it."""
import threading


class ConfigBus:
    def __init__(self):
        self._watchers = {}
        self._n = 0
        self._lock = threading.Lock()

    def watch(self, key, fn):
        with self._lock:
            self._n += 1
            wid = self._n
            self._watchers[wid] = (key, fn)

        def cancel():
            with self._lock:
                self._watchers.pop(wid, None)

        return cancel

    def set(self, key, value):
        for k, fn in list(self._watchers.values()):
            if k == key:
                fn(value)


class Autoscaler:
    def __init__(self, bus: ConfigBus, fleet):
        self.bus = bus
        self.fleet = fleet
        self._stop = None

    def start(self):
        self._stop = self.bus.watch("replicas", self.fleet.resize)  # clean: stop() calls it

    def stop(self):
        if self._stop:
            self._stop()
            self._stop = None

    def wait_for(self, key, timeout):
        seen = threading.Event()
        cancel = self.bus.watch(key, lambda _: seen.set())  # clean: cancelled in finally
        try:
            return seen.wait(timeout)
        finally:
            cancel()

    def next_value(self, key, timeout):
        box = []
        seen = threading.Event()
        cancel = self.bus.watch(key, lambda v: (box.append(v), seen.set()))  # leak: the timeout returns early
        if not seen.wait(timeout):
            return None
        cancel()
        return box[0]

    def dry_run(self, keys, log):
        for key in keys:
            cancel = self.bus.watch(key, log)  # leak: overwritten in each turn, only the last is cancelled
        self.fleet.simulate()
        cancel()
