import queue


class EnvCrashed(Exception):
    pass


class EnvPool:
    """Environments run in sandboxes that cost seconds to start, so they are used again."""

    def __init__(self, start, count, max_uses=200):
        self._start = start
        self._max_uses = max_uses
        self._idle = queue.LifoQueue()
        for _ in range(count):
            self._idle.put(start())  # clean: close() stops all that are idle

    def checkout(self, timeout=60.0):
        env = self._idle.get(timeout=timeout)  # leak: a worn-out sandbox is replaced by a new one and never stopped
        if env.uses >= self._max_uses:
            env = self._start()  # clean: returned to the caller
        env.uses += 1
        return env

    def checkin(self, env):
        self._idle.put(env)

    def replace(self, env):
        """For one that crashed."""
        env.stop()
        self._idle.put(self._start())  # clean: goes into the pool in place of the crashed one

    def close(self):
        while not self._idle.empty():
            env = self._idle.get()  # clean: stopped in the next line
            env.stop()
