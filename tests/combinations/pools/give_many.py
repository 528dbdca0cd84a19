# take: P.try_get()
# give: P.put(X)
# gets: optional
class Pool:
    def __init__(self, count):
        self._free = list(range(count))

    def try_get(self):
        if not self._free:
            return None
        return self._free.pop()

    def put(self, *slots):
        for slot in slots:
            self._free.append(slot)
