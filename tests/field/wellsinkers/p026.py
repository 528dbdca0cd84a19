"""Entity handles made of slot and generation."""
from typing import NamedTuple


class Handle(NamedTuple):
    slot: int
    generation: int


class World:
    def __init__(self, capacity):
        self.generation = [0] * capacity
        self.alive = [False] * capacity
        self.value = [None] * capacity
        self.vacant = list(reversed(range(capacity)))

    def create(self, value):
        slot = self.vacant.pop()
        self.alive[slot] = True
        self.value[slot] = value
        return Handle(slot, self.generation[slot])

    def valid(self, handle):
        return self.alive[handle.slot] and self.generation[handle.slot] == handle.generation

    def destroy(self, handle):
        if not self.valid(handle):
            return False
        self.alive[handle.slot] = False
        self.value[handle.slot] = None
        self.generation[handle.slot] += 1
        self.vacant.append(handle.slot)
        return True


class Spawner:
    def __init__(self, world, terrain):
        self.world = world
        self.terrain = terrain
        self.mobs = []

    def spawn(self, kind, x, y):
        handle = self.world.create((kind, x, y))  # leak: blocked places lose the handle
        if self.terrain.blocked(x, y):
            return False
        self.mobs.append(handle)
        return True

    def spawn_boss(self, x, y):
        self.mobs.append(self.world.create(("boss", x, y)))  # clean: kept, destroyed by despawn

    def despawn(self):
        for handle in self.mobs:
            self.world.destroy(handle)
        self.mobs.clear()


def ray_hits(world, terrain, ray):
    bullet = world.create(("bullet", *ray.origin))  # leak: destroyed only when it hits
    hits = terrain.trace(ray, bullet)
    if hits:
        world.destroy(bullet)
    return hits


def ghost_path(world, terrain, start, goal):
    ghost = world.create(("ghost", *start))  # clean: destroyed after the search
    path = terrain.path(ghost, goal)
    world.destroy(ghost)
    return path
