"""A metered facade around a pool of crypto engines."""
import collections


class EnginePool:
    def __init__(self, engines):
        self._engines = collections.deque(engines)

    def acquire(self):
        return self._engines.popleft() if self._engines else None

    def release(self, engine):
        self._engines.append(engine)


class MeteredPool:
    def __init__(self, inner, limit):
        self.inner = inner
        self.limit = limit
        self.out = 0
        self.refused = 0

    def acquire(self):
        if self.out >= self.limit:
            self.refused += 1
            return None
        engine = self.inner.acquire()  # clean: handed to the caller
        if engine is not None:
            self.out += 1
        return engine

    def release(self, engine):
        self.out -= 1
        self.inner.release(engine)

    def take_two(self):
        a = self.acquire()  # clean: released again when the second is refused
        if a is None:
            return None
        b = self.acquire()  # clean: handed on in the pair
        if b is None:
            self.release(a)
            return None
        return a, b


class Vault:
    def __init__(self, pool):
        self.pool = pool
        self.sealed = {}

    def seal(self, name, secret):
        engine = self.pool.acquire()  # clean: released
        if engine is None:
            return False
        self.sealed[name] = engine.encrypt(secret)
        self.pool.release(engine)
        return True

    def open(self, name):
        engine = self.pool.acquire()  # leak: an unknown name returns before the release
        if engine is None:
            return None
        box = self.sealed.get(name)
        if box is None:
            return None
        secret = engine.decrypt(box)
        self.pool.release(engine)
        return secret

    def reseal(self, name):
        pair = self.pool.take_two()  # clean: both of the pair are released
        if pair is None:
            return False
        old, new = pair
        if name in self.sealed:
            self.sealed[name] = new.encrypt(old.decrypt(self.sealed[name]))
        for engine in pair:
            self.pool.release(engine)
        return True

    def compare(self, name, other):
        pair = self.pool.take_two()  # leak: only the first of the pair is released
        if pair is None:
            return False
        same = pair[0].decrypt(self.sealed[name]) == pair[1].decrypt(self.sealed[other])
        self.pool.release(pair[0])
        return same
