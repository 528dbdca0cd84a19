# take: P.vacant()
# give: X.let_go()
# gets: optional
class Slot:
    """Takes back itself what its table has marked."""

    def __init__(self, number):
        self.number = number
        self.count = 0
        self.blobs = {}

    def hold(self):
        self.count += 1
        return self

    def let_go(self):
        self.count -= 1
        if self.count == 0:
            self.blobs.clear()


class Pool:
    def __init__(self, count):
        self.slots = [Slot(number) for number in range(count)]

    def vacant(self):
        for slot in self.slots:
            if slot.count == 0:
                slot.count = 1
                return slot
        return None
