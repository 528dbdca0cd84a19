# take: P.admit(key)
# give: P.discharge(key)
# gets: answer
class Pool:
    def __init__(self, limit):
        self.limit = limit
        self._inside = set()

    def admit(self, rid):
        if len(self._inside) >= self.limit:
            return False
        self._inside.add(rid)
        return True

    def discharge(self, rid):
        self._inside.remove(rid)
