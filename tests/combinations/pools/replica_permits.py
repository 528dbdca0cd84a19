# take: P.reserve(key)
# give: P.leave(X)
# gets: optional
class Permits:
    def __init__(self, count):
        self.count = count
        self.inside = 0

    def try_enter(self):
        if self.inside >= self.count:
            return False
        self.inside += 1
        return True

    def leave(self):
        self.inside -= 1


class Replica:
    def __init__(self, name, count):
        self.name = name
        self.permits = Permits(count)
        self.down = False


class Pool:
    """A permit of one of many, which is handed out with it."""

    def __init__(self, names):
        self.replicas = [Replica(name, 8) for name in names]

    def reserve(self, user):
        for replica in self.replicas:
            if not replica.down and replica.permits.try_enter():
                return replica
        return None

    def leave(self, replica):
        replica.permits.leave()
