# take: P.rack(n)
# give: P.unrack(X)
# gets: optional
# type: ClassedSlabs
from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True)
class Slab:
    cls: int
    number: int


class ClassedSlabs:
    CLASSES = [4 << 10, 64 << 10, 1 << 20, 16 << 20]

    def __init__(self, per_class=32):
        # free count and next number are enough while nothing came back; returned slabs go on `back`
        self.unused = [per_class] * len(self.CLASSES)
        self.back = [[] for _ in self.CLASSES]

    def rack(self, nbytes):
        for c in range(bisect_left(self.CLASSES, nbytes), len(self.CLASSES)):
            if self.back[c]:
                return self.back[c].pop()
            if self.unused[c]:
                self.unused[c] -= 1
                return Slab(c, self.unused[c])
        return None

    def unrack(self, slab):
        if slab in self.back[slab.cls]:
            raise RuntimeError(f"{slab} racked twice")
        self.back[slab.cls].append(slab)
