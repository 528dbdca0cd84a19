# take: P.open_rack()
# give: P.racks.settle(X)
class Racks:
    def __init__(self, count):
        self._spare = [bytearray(512) for _ in range(count)]

    def lend(self):
        if not self._spare:
            raise RuntimeError("no rack")
        return self._spare.pop()

    def settle(self, rack):
        self._spare.append(rack)


class Scope:
    """Gives back at its end what nobody has kept."""

    def __init__(self, racks: Racks):
        self.racks = racks
        self.mine = []

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        while self.mine:
            self.racks.settle(self.mine.pop())

    def get(self):
        rack = self.racks.lend()
        self.mine.append(rack)
        return rack

    def keep(self, rack):
        self.mine = [each for each in self.mine if each is not rack]
        return rack


class Pool:
    def __init__(self, racks: Racks):
        self.racks = racks

    def open_rack(self):
        with Scope(self.racks) as scope:
            rack = scope.get()
            rack[0] = 1
            return scope.keep(rack)
