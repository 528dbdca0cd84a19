# take: P.assign(self.name)
# give: P.unassign(X)
# gets: optional
class Pool:
    def __init__(self, names):
        self._available = set(names)
        self._taken = {}

    def assign(self, job):
        name = next(iter(self._available), None)
        if name is None:
            return None
        self._available.remove(name)
        self._taken[name] = job
        return name

    def unassign(self, name):
        self._taken.pop(name)
        self._available.add(name)
