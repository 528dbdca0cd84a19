"""Game entities: slots with generations, so that stale ids are recognised."""
from typing import NamedTuple


class Entity(NamedTuple):
    index: int
    generation: int


class EntityTable:
    def __init__(self, limit=4096):
        self.generation = [0] * limit
        self.alive = [False] * limit
        self.vacant = list(range(limit - 1, -1, -1))

    def create(self):
        index = self.vacant.pop()
        self.alive[index] = True
        return Entity(index, self.generation[index])

    def valid(self, e):
        return self.alive[e.index] and self.generation[e.index] == e.generation

    def destroy(self, e):
        if self.valid(e):
            self.alive[e.index] = False
            self.generation[e.index] += 1
            self.vacant.append(e.index)


class World:
    def __init__(self, table, physics):
        self.table = table
        self.physics = physics
        self.monsters = []

    def add_monster(self, pos):
        e = self.table.create()  # clean: kept in monsters, destroyed by clear()
        self.physics.place(e, pos)
        self.monsters.append(e)

    def clear(self):
        for e in self.monsters:
            self.table.destroy(e)
        self.monsters.clear()

    def ray_test(self, origin, direction):
        probe = self.table.create()  # clean: destroyed before the hit is returned
        self.physics.place(probe, origin)
        hit = self.physics.sweep(probe, direction)
        self.table.destroy(probe)
        return hit

    def can_stand(self, pos):
        probe = self.table.create()  # leak: solid ground returns False before the probe is destroyed
        self.physics.place(probe, pos)
        if self.physics.overlaps(probe):
            return False
        self.table.destroy(probe)
        return True

    def burst(self, pos, n):
        for i in range(n):
            spark = self.table.create()  # leak: only every second spark is destroyed
            self.physics.place(spark, pos)
            if i % 2:
                self.table.destroy(spark)
