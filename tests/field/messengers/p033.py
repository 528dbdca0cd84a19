"""Two-node placements: memory is reserved by (node, megabytes)."""
import logging
from typing import NamedTuple

log = logging.getLogger("placement")


class Claim(NamedTuple):
    node: str
    megabytes: int


class ClusterMemory:
    def __init__(self, capacity):
        self._left = dict(capacity)

    def claim(self, node, megabytes):
        if self._left.get(node, 0) < megabytes:
            return None
        self._left[node] -= megabytes
        return Claim(node, megabytes)

    def unclaim(self, claim):
        self._left[claim.node] += claim.megabytes


class Placer:
    def __init__(self, memory, rack_of):
        self.memory = memory
        self.rack_of = rack_of
        self.placed = {}

    def claim_all(self, nodes, megabytes):
        held = []
        for node in nodes:
            claim = self.memory.claim(node, megabytes)  # clean: handed on as a list, or all rolled back
            if claim is None:
                for earlier in held:
                    self.memory.unclaim(earlier)
                return None
            held.append(claim)
        return held

    def claim_some(self, nodes, megabytes):
        claims = (self.memory.claim(node, megabytes) for node in nodes)  # clean: handed on in the list
        return [claim for claim in claims if claim is not None]

    def place(self, job, nodes, megabytes):
        if job in self.placed:
            return False
        claims = self.claim_all(nodes, megabytes)  # clean: stored under the job
        if claims is None:
            log.info("%s does not fit", job)
            return False
        self.placed[job] = claims
        return True

    def place_spread(self, job, nodes, megabytes):
        claims = self.claim_some(nodes, megabytes)  # leak: fewer than two racks return with them held
        racks = {self.rack_of[claim.node] for claim in claims}
        if len(racks) < 2:
            return False
        self.placed[job] = claims
        return True

    def place_one(self, job, nodes, megabytes):
        claims = self.claim_some(nodes, megabytes)  # leak: the first is stored, the rest is forgotten
        if not claims:
            return False
        self.placed[job] = claims[:1]
        return True

    def headroom(self, nodes, megabytes):
        claims = self.claim_some(nodes, megabytes)  # clean: all unclaimed
        for claim in claims:
            self.memory.unclaim(claim)
        return len(claims)

    def remove(self, job):
        for claim in self.placed.pop(job, []):
            self.memory.unclaim(claim)
