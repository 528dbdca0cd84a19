"""Partitions of a log: members of a group claim and relinquish them."""
from collections import defaultdict


class Partitions:
    def __init__(self, topic, count):
        self.topic = topic
        self.unowned = set(range(count))
        self.owned = defaultdict(set)
        self.offsets = dict.fromkeys(range(count), 0)

    def assign(self, member):
        if not self.unowned:
            return None
        p = min(self.unowned)
        self.unowned.remove(p)
        self.owned[member].add(p)
        return p

    def revoke(self, member, p):
        self.owned[member].discard(p)
        self.unowned.add(p)

    def advance(self, p, offset):
        self.offsets[p] = max(self.offsets[p], offset)


class Consumer:
    def __init__(self, name, partitions, log):
        self.name = name
        self.partitions = partitions
        self.log = log

    def poll_one(self, handle):
        p = self.partitions.assign(self.name)  # clean: revoked in finally
        if p is None:
            return 0
        try:
            records = self.log.read(p, self.partitions.offsets[p])
            for r in records:
                handle(r)
            self.partitions.advance(p, self.partitions.offsets[p] + len(records))
            return len(records)
        finally:
            self.partitions.revoke(self.name, p)

    def skip_to_end(self):
        p = self.partitions.assign(self.name)  # leak: a partition already at its end is not revoked
        if p is None:
            return
        end = self.log.end(p)
        if end > self.partitions.offsets[p]:
            self.partitions.advance(p, end)
            self.partitions.revoke(self.name, p)

    def sweep(self, handle):
        while (p := self.partitions.assign(self.name)) is not None:  # leak: an empty partition ends the sweep
            records = self.log.read(p, self.partitions.offsets[p])
            if not records:
                break
            handle(records)
            self.partitions.revoke(self.name, p)

    def lag(self):
        p = self.partitions.assign(self.name)  # clean: revoked in the branch that has one
        behind = 0
        if p is not None:
            behind = self.log.end(p) - self.partitions.offsets[p]
            self.partitions.revoke(self.name, p)
        return behind
