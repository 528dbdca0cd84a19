# take: P.seat(key)
# give: P.unseat(key)
# gets: answer
# type: AdapterSeating
class AdapterSeating:
    """
    Which LoRA adapter sits in which row of the stacked A/B weights.

    A seat counts its passengers (running requests with that adapter); a seat with none keeps its
    weights until another adapter wants it.
    """

    def __init__(self, rows):
        self.names = [None] * rows
        self.riders = [0] * rows

    def row_of(self, name):
        return self.names.index(name)

    def seat(self, name):
        if name in self.names:
            self.riders[self.names.index(name)] += 1
            return True
        for row, (who, count) in enumerate(zip(self.names, self.riders)):
            if who is None or count == 0:
                self.names[row] = name
                self.riders[row] = 1
                return True
        return False

    def unseat(self, name):
        row = self.names.index(name)
        if self.riders[row] == 0:
            raise ValueError("adapter %r has no riders" % name)
        self.riders[row] -= 1
