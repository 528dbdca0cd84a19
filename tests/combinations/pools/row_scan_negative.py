# take: P.claim(key)
# give: P.vacate(X)
# gets: negative
# type: DecodeRows
class DecodeRows:
    def __init__(self, rows):
        self.occupant = [None] * rows

    def claim(self, who):
        for row, other in enumerate(self.occupant):
            if other is None:
                self.occupant[row] = who
                return row
        return -1

    def vacate(self, row):
        self.occupant[row] = None
