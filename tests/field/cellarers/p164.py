"""Projectiles of a shooter, preallocated; the live ones stand at the front of the array."""


class Projectile:
    def __init__(self):
        self.x = self.y = self.vx = self.vy = 0.0
        self.ttl = 0
        self.slot = -1


class ProjectilePool:
    def __init__(self, n):
        self.items = [Projectile() for _ in range(n)]
        for i, p in enumerate(self.items):
            p.slot = i
        self.live = 0

    def spawn(self, x, y, vx, vy, ttl=120):
        if self.live == len(self.items):
            return None
        p = self.items[self.live]
        self.live += 1
        p.x, p.y, p.vx, p.vy, p.ttl = x, y, vx, vy, ttl
        return p

    def despawn(self, p):
        self.live -= 1
        last = self.items[self.live]
        self.items[p.slot], self.items[self.live] = last, p
        p.slot, last.slot = last.slot, p.slot


class Gun:
    def __init__(self, pool, owner):
        self.pool = pool
        self.owner = owner
        self.shots = []

    def fire(self, angle_x, angle_y):
        p = self.pool.spawn(self.owner.x, self.owner.y, angle_x, angle_y)  # clean: despawned by update()
        if p is not None:
            self.shots.append(p)

    def update(self):
        for p in [s for s in self.shots if s.ttl <= 0]:
            self.shots.remove(p)
            self.pool.despawn(p)

    def trace(self, level, steps):
        p = self.pool.spawn(self.owner.x, self.owner.y, 1.0, 0.0)  # leak: a hit wall returns out of the loop
        if p is None:
            return None
        for _ in range(steps):
            p.x += p.vx
            if level.solid(p.x, p.y):
                return p.x
        self.pool.despawn(p)
        return None

    def preview(self, level):
        p = self.pool.spawn(0.0, 0.0, 0.0, 1.0)  # clean: despawned after the drop
        if p is None:
            return 0.0
        depth = level.drop(p)
        self.pool.despawn(p)
        return depth

    def muzzle_flash(self):
        self.pool.spawn(self.owner.x, self.owner.y, 0.0, 0.0, ttl=3)  # leak: in no list, never despawned
