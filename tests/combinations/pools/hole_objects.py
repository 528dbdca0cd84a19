# take: P.cut_out(64)
# give: P.sew_in(X)
# gets: optional
@dataclass
class Hole:
    start: int
    length: int


class Pool:
    def __init__(self, size):
        self.holes = [Hole(0, size)]

    def cut_out(self, size):
        for hole in self.holes:
            if hole.length >= size:
                piece = Hole(hole.start, size)
                hole.start += size
                hole.length -= size
                if hole.length == 0:
                    self.holes.remove(hole)
                return piece
        return None

    def sew_in(self, piece):
        self.holes.append(piece)
        self.holes.sort(key=lambda each: each.start)
