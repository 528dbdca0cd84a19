"""Pools behind proxies: attribute delegation, aliases of methods, partial methods."""
import functools


class BasePool:
    def __init__(self):
        self._items = []
        self.created = 0

    def acquire(self):
        if self._items:
            return self._items.pop()
        self.created += 1
        return [self.created]

    def release(self, item):
        self._items.append(item)

    give = release


class TracingPool:
    """Everything not defined here is the inner pool's."""

    def __init__(self, inner, log):
        self._inner = inner
        self.log = log

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def release(self, item):
        self.log.append(item)
        self._inner.release(item)


class TaggedPool(BasePool):
    def acquire(self, tag="none"):
        item = super().acquire()  # clean: near miss, the subclass's own body hands it on
        item.append(tag)
        return item

    acquire_key = functools.partialmethod(acquire, tag="key")
    acquire_value = functools.partialmethod(acquire, "value")

    def release(self, item):
        del item[1:]
        super().release(item)


def traced(pool: TracingPool, n):
    item = pool.acquire()  # clean: near miss, acquired by delegation, released by the proxy
    try:
        return item[0] * n
    finally:
        pool.release(item)


def traced_some(pool: TracingPool, n):
    item = pool.acquire()  # leak: zero returns before the release
    if n == 0:
        return 0
    value = item[0] * n
    pool.release(item)
    return value


def by_alias(pool: BasePool, n):
    item = pool.acquire()  # clean: near miss, given back by an alias of release
    value = item[0] + n
    pool.give(item)
    return value


def by_name(pool: BasePool, n, method="release"):
    item = pool.acquire()  # clean: near miss, released through a local name bound to the method
    give_back = pool.release
    value = item[0] - n
    give_back(item)
    return value


def tagged(pool: TaggedPool):
    key = pool.acquire("key")  # clean: near miss, released in the loop over both
    value = pool.acquire("value")  # clean: near miss, released in the loop over both
    size = len(key) + len(value)
    for item in (value, key):
        pool.release(item)
    return size


def tagged_one(pool: TaggedPool, want):
    key = pool.acquire("key")  # leak: when the value is wanted only the value is released
    value = pool.acquire("value")  # leak: when the key is wanted only the key is released
    if want == "key":
        pool.release(key)
        return len(key)
    pool.release(value)
    return len(value)


def tagged_either(pool: TaggedPool, want):
    if want == "key":
        item = pool.acquire("key")  # clean: near miss, one of two acquires, one release for both
    else:
        item = pool.acquire("value")  # clean: near miss, one of two acquires, one release for both
    size = len(item)
    pool.release(item)
    return size
