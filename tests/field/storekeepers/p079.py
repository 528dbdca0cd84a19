from collections import deque
from dataclasses import dataclass, field


class BerthPool:
    """Container berths; a claim is the pair (row, amount)."""

    def __init__(self, rows):
        self.rows = dict(rows)

    def claim(self, row, amount):
        if self.rows.get(row, 0) < amount:
            return None
        self.rows[row] -= amount
        return row, amount

    def unclaim(self, claim):
        row, amount = claim
        self.rows[row] += amount


@dataclass
class Vessel:
    name: str
    claims: list = field(default_factory=list)
    crane: tuple = None


class Terminal:
    def __init__(self, berths, cranes):
        self.berths = berths
        self.cranes = cranes
        self.at_anchor = deque()
        self.moored = {}
        self.overflow = berths.claim("yard", 1)  # clean: close unclaims it

    def arrive(self, name, row, length):
        if name in self.moored or any(v.name == name for v in self.at_anchor):
            return False
        claim = self.berths.claim(row, length)  # leak: divert filters vessels out
        if claim is None:
            return False
        self.at_anchor.append(Vessel(name, [claim]))
        return True

    def moor(self):
        if not self.at_anchor:
            return None
        vessel = self.at_anchor[0]
        vessel.crane = self.cranes.claim("quay", 1)  # leak: sail unclaims the berth claims and not the crane
        if vessel.crane is None:
            return None
        self.at_anchor.popleft()
        self.moored[vessel.name] = vessel
        return vessel.name

    def lengthen(self, name, row, amount):
        claim = self.berths.claim(row, amount)  # clean: joins the claims that sail gives back
        if claim is not None:
            self.moored[name].claims.append(claim)
        return claim is not None

    def divert(self, name):
        keep = deque(v for v in self.at_anchor if v.name != name)
        gone = len(self.at_anchor) - len(keep)
        self.at_anchor = keep
        return gone

    def sail(self, name):
        vessel = self.moored.pop(name, None)
        if vessel is None:
            return 0
        total = 0
        for claim in vessel.claims:
            self.berths.unclaim(claim)
            total += claim[1]
        return total

    def close(self):
        for name in list(self.moored):
            self.sail(name)
        for vessel in self.at_anchor:
            for claim in vessel.claims:
                self.berths.unclaim(claim)
        self.at_anchor.clear()
        if self.overflow is not None:
            self.berths.unclaim(self.overflow)
            self.overflow = None
