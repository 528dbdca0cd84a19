"""Advisory locks spread over shards by the hash of the key."""
import threading
import zlib


class Shard:
    def __init__(self):
        self.owners = {}
        self.cv = threading.Condition()


class ShardedLocks:
    def __init__(self, shards=16):
        self._shards = [Shard() for _ in range(shards)]

    def _shard(self, key):
        return self._shards[zlib.crc32(key.encode()) % len(self._shards)]

    def seize(self, key, timeout=None):
        shard = self._shard(key)
        with shard.cv:
            if not shard.cv.wait_for(lambda: key not in shard.owners, timeout):
                return False
            shard.owners[key] = threading.get_ident()
            return True

    def yield_up(self, key):
        shard = self._shard(key)
        with shard.cv:
            shard.owners.pop(key, None)
            shard.cv.notify_all()


class Inventory:
    def __init__(self, locks, stock):
        self.locks = locks
        self.stock = stock

    def take(self, sku, n):
        if not self.locks.seize(sku, 2.0):  # clean: nothing held when refused, otherwise finally
            return False
        try:
            self.stock[sku] -= n
            return True
        finally:
            self.locks.yield_up(sku)

    def take_if_any(self, sku):
        self.locks.seize(sku)  # leak: an empty shelf returns with the key locked
        if self.stock.get(sku, 0) == 0:
            return False
        self.stock[sku] -= 1
        self.locks.yield_up(sku)
        return True

    def restock(self, deliveries):
        for sku, n in deliveries:
            if self.locks.seize(sku, 0.5):  # clean: yielded in the branch that holds it
                self.stock[sku] = self.stock.get(sku, 0) + n
                self.locks.yield_up(sku)

    def rename(self, old, new):
        self.locks.seize(old)  # clean: yielded below
        self.locks.seize(new)  # leak: the new key stays locked after the move
        self.stock[new] = self.stock.pop(old)
        self.locks.yield_up(old)
