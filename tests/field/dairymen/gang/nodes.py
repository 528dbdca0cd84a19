"""Node inventory: machines are pulled for a job and pushed back afterwards."""
import collections
import logging

log = logging.getLogger("gang.nodes")


class NoNodes(Exception):
    pass


class DrainFailed(Exception):
    pass


class Node:
    def __init__(self, name, gpus, rack):
        self.name = name
        self.gpus = gpus
        self.rack = rack
        self.cordoned = False
        self.job = None


class Inventory:
    def __init__(self, nodes):
        self._by_rack = collections.defaultdict(list)
        for n in nodes:
            self._by_rack[n.rack].append(n)
        self.repair = []

    def pull(self, job):
        for rack in sorted(self._by_rack, key=lambda r: -len(self._by_rack[r])):
            if self._by_rack[rack]:
                node = self._by_rack[rack].pop()  # clean: handed to the caller
                node.job = job
                return node
        raise NoNodes(job)

    def pull_rack(self, job, n):
        """n nodes of one rack or an empty list."""
        for rack, ready in self._by_rack.items():
            if len(ready) < n:
                continue
            picked = [ready.pop() for _ in range(n)]  # leak: a cordoned node in the pick is left out of the result and goes nowhere
            for node in picked:
                node.job = job
            return [node for node in picked if not node.cordoned]
        return []

    def pull_uncordoned(self, job):
        aside, found = [], None
        for ready in self._by_rack.values():
            while ready and found is None:
                node = ready.pop()  # clean: near miss, cordoned ones wait in aside and are pushed below
                if node.cordoned:
                    aside.append(node)
                else:
                    found = node
        for node in aside:
            self.push(node)
        if found is not None:
            found.job = job
        return found

    def push(self, node):
        node.job = None
        self._by_rack[node.rack].append(node)

    def count(self):
        return sum(len(v) for v in self._by_rack.values())

    def drain(self, node):
        if node.job is not None and node.gpus == 0:
            raise DrainFailed(node.name)
        node.cordoned = True
