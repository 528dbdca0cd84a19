# take: P.join(key)
# give: P.leave(key)
# gets: answer
class Pool:
    def __init__(self, rows):
        self._rows = list(range(rows))
        self._row_of = {}

    def join(self, rid):
        if not self._rows:
            return False
        self._row_of[rid] = self._rows.pop()
        return True

    def leave(self, rid):
        self._rows.append(self._row_of.pop(rid))
