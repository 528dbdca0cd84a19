"""Entity slots of a game shard, handed out by a spawn strategy."""
import random


class EntityTable:
    def __init__(self, size):
        self._vacant = list(range(size))
        self.kind = [None] * size

    def occupy(self):
        return self._vacant.pop() if self._vacant else -1

    def evict(self, slot):
        self.kind[slot] = None
        self._vacant.append(slot)


class EagerSpawn:
    def slot_for(self, table, kind):
        return table.occupy()  # clean: handed to the shard


class SparseSpawn:
    def __init__(self, chance):
        self.chance = chance

    def slot_for(self, table, kind):
        if random.random() > self.chance:
            return -1
        slot = table.occupy()  # clean: handed to the shard
        if slot >= 0:
            table.kind[slot] = kind
        return slot


class Shard:
    def __init__(self, table, strategy, limit):
        self.table = table
        self.strategy = strategy
        self.limit = limit
        self.mobs = {}

    def spawn(self, name, kind):
        slot = self.strategy.slot_for(self.table, kind)  # leak: the shard is full, -1 is returned instead
        if slot < 0:
            return -1
        if len(self.mobs) >= self.limit:
            return -1
        self.table.kind[slot] = kind
        self.mobs[name] = slot
        return slot

    def spawn_pair(self, name, kind):
        if name + ".b" in self.mobs:
            return False
        first = self.strategy.slot_for(self.table, kind)  # leak: the second one is refused
        second = self.strategy.slot_for(self.table, kind)  # clean: stored in mobs when given
        if first < 0:
            if second >= 0:
                self.table.evict(second)
            return False
        if second < 0:
            return False
        self.mobs[name + ".a"] = first
        self.mobs[name + ".b"] = second
        return True

    def flash(self, kind, ticks):
        slot = self.strategy.slot_for(self.table, kind)  # clean: evicted after the ticks
        if slot == -1:
            return 0
        seen = 0
        for _ in range(ticks):
            seen += self.table.kind[slot] is not None
        self.table.evict(slot)
        return seen

    def kill(self, name):
        slot = self.mobs.pop(name, None)
        if slot is not None:
            self.table.evict(slot)
