"""Slices of several cards: a profile is placed on the card with the least room left."""
from dataclasses import dataclass

PROFILES = {"1g": 1, "2g": 2, "3g": 4, "7g": 8}


@dataclass(frozen=True)
class Slice:
    card: int
    start: int
    width: int


class SliceMap:
    def __init__(self, cards, units=8):
        self.units = units
        self.cells = [["."] * units for _ in range(cards)]

    def _fits(self, card):
        return self.cells[card].count(".")

    def place(self, profile, tag):
        width = PROFILES[profile]
        for card in sorted(range(len(self.cells)), key=self._fits):
            row = self.cells[card]
            for start in range(0, self.units - width + 1, width):
                if all(c == "." for c in row[start:start + width]):
                    row[start:start + width] = [tag] * width
                    return Slice(card, start, width)
        return None

    def unplace(self, s):
        self.cells[s.card][s.start:s.start + s.width] = ["."] * s.width


class Tenant:
    def __init__(self, slices, runtime):
        self.slices = slices
        self.runtime = runtime
        self.pods = {}

    def schedule(self, pod, profile):
        s = self.slices.place(profile, pod)  # leak: a pod that does not boot keeps the slice
        if s is None:
            return "pending"
        if not self.runtime.boot(pod, s):
            return "crashed"
        self.pods[pod] = s
        return "running"

    def delete(self, pod):
        self.slices.unplace(self.pods.pop(pod))

    def notebook(self, pod):
        s = self.slices.place("1g", pod)  # clean: kept for delete, or unplaced
        if s is not None and self.runtime.boot(pod, s):
            self.pods[pod] = s
        elif s is not None:
            self.slices.unplace(s)


def largest(slices):
    for profile in ("7g", "3g", "2g", "1g"):
        s = slices.place(profile, "?")  # leak: the one that fits is not unplaced
        if s is not None:
            return profile
    return None
