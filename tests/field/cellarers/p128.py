"""A measuring pool over another pool."""
import queue
import time


class RawPool:
    def __init__(self, factory, n):
        self._q = queue.Queue()
        for _ in range(n):
            self._q.put(factory())

    def take(self):
        return self._q.get()

    def put_back(self, item):
        self._q.put(item)


class MeteredPool:
    def __init__(self, inner, stats):
        self._inner = inner
        self._stats = stats
        self._since = {}

    def rent(self):
        item = self._inner.take()  # clean: handed on to the caller of rent()
        self._since[id(item)] = time.monotonic()
        return item

    def end_rent(self, item):
        self._stats.observe(time.monotonic() - self._since.pop(id(item)))
        self._inner.put_back(item)


class Geocoder:
    def __init__(self, clients: MeteredPool):
        self.clients = clients

    def lookup(self, address):
        client = self.clients.rent()  # clean: rent ended in finally
        try:
            return client.geocode(address)
        finally:
            self.clients.end_rent(client)

    def reverse(self, lat, lon):
        client = self.clients.rent()  # leak: only hits end the rent
        hit = client.reverse(lat, lon)
        if hit:
            self.clients.end_rent(client)
        return hit

    def both(self, address):
        client = self.clients.rent()  # clean: one client for both calls
        place = client.geocode(address)
        back = client.reverse(*place)
        self.clients.end_rent(client)
        return place, back


def raw_ping(pool: RawPool):
    client = pool.take()  # clean: put back before the answer
    ok = client.ping()
    pool.put_back(client)
    return ok


def raw_version(pool: RawPool):
    return pool.take().version()  # leak: the client is used in place and not put back
