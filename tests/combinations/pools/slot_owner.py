# take: P.assign(self.name)
# give: P.vacate(X)
# gets: optional
@dataclass
class Slot:
    index: int
    owner: str | None = None


class Pool:
    def __init__(self, count):
        self.slots = [Slot(i) for i in range(count)]

    def assign(self, owner):
        for slot in self.slots:
            if slot.owner is None:
                slot.owner = owner
                return slot.index
        return None

    def vacate(self, index):
        self.slots[index].owner = None
