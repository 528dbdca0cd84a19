"""Communicators keyed by the set of ranks, made once and counted."""
from collections import Counter


class Communicators:
    def __init__(self, backend, max_live=8):
        self.backend = backend
        self.max_live = max_live
        self.live = {}
        self.users = Counter()

    @staticmethod
    def key(ranks):
        return frozenset(ranks)

    def join_group(self, ranks):
        key = self.key(ranks)
        if key not in self.live:
            if len(self.live) >= self.max_live:
                self._close_idle()
            self.live[key] = self.backend.create(sorted(key))
        self.users[key] += 1
        return self.live[key]

    def quit_group(self, ranks):
        self.users[self.key(ranks)] -= 1

    def _close_idle(self):
        for key in [k for k in self.live if self.users[k] == 0]:
            self.backend.destroy(self.live.pop(key))
            del self.users[key]


class PipelineStage:
    def __init__(self, comms, ranks):
        self.comms = comms
        self.ranks = ranks
        self.comm = comms.join_group(ranks)  # clean: held by the stage, quit by teardown

    def teardown(self):
        self.comms.quit_group(self.ranks)


def all_reduce(comms, ranks, tensor):
    comm = comms.join_group(ranks)  # clean: quit in finally
    try:
        return comm.all_reduce(tensor)
    finally:
        comms.quit_group(ranks)


def broadcast(comms, ranks, tensor, root):
    comm = comms.join_group(ranks)  # leak: a root outside the group returns at once
    if root not in ranks:
        return tensor
    out = comm.broadcast(tensor, root)
    comms.quit_group(ranks)
    return out


def bandwidth(comms, groups, probe):
    results = {}
    for ranks in groups:
        comm = comms.join_group(ranks)  # leak: slow groups are not quit
        rate = probe(comm)
        if rate > 1.0:
            results[tuple(ranks)] = rate
            comms.quit_group(ranks)
    return results
