# take: P.next_lane()
# give: X.rest()
# gets: optional
# type: LaneYard
class Lane:
    def __init__(self, yard, n):
        self.yard, self.n = yard, n

    def rest(self):
        self.yard.waiting.append(self)


class LaneYard:
    def __init__(self, n):
        self.waiting = [Lane(self, i) for i in range(n)]

    def next_lane(self):
        if not self.waiting:
            return None
        return self.waiting.pop(0)
