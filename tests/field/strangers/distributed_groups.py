"""Communicators are created per subgroup of ranks and destroyed explicitly."""
import logging

logger = logging.getLogger("groups")


class Communicator:
    def __init__(self, ranks):
        self.ranks = tuple(ranks)
        self.aborted = False

    def barrier(self):
        return not self.aborted


class CommFactory:
    def __init__(self):
        self.registry = {}

    def create_comm(self, ranks):
        comm = Communicator(ranks)
        self.registry[id(comm)] = comm
        return comm

    def destroy_comm(self, comm):
        self.registry.pop(id(comm), None)


class Mesh:
    def __init__(self, factory, world):
        self.factory = factory
        self.world = world
        self.tp = None
        self.groups = []

    def build(self, size):
        for start in range(0, self.world, size):
            comm = self.factory.create_comm(range(start, start + size))  # clean: near miss, torn down from the list
            self.groups.append(comm)

    def teardown(self):
        for comm in self.groups:
            self.factory.destroy_comm(comm)
        self.groups = []
        if self.tp is not None:
            self.factory.destroy_comm(self.tp)
            self.tp = None

    def set_tensor_parallel(self, ranks):
        if self.tp is not None:
            self.factory.destroy_comm(self.tp)
        self.tp = self.factory.create_comm(ranks)  # clean: near miss, the old one was destroyed just above

    def check_all(self, size):
        healthy = True
        for start in range(0, self.world, size):
            comm = self.factory.create_comm(range(start, start + size))  # leak: an unhealthy one returns at once
            if not comm.barrier():
                logger.error("group at %d is down", start)
                return False
            self.factory.destroy_comm(comm)
        return healthy

    def any_healthy(self, candidates):
        return any(self.factory.create_comm(c).barrier() for c in candidates)  # leak: temporaries nobody destroys

    def largest(self, candidates):
        best = None
        for ranks in candidates:
            comm = self.factory.create_comm(ranks)  # clean: near miss, loser destroyed each round, winner after the loop
            if best is None:
                best = comm
            elif len(comm.ranks) > len(best.ranks):
                self.factory.destroy_comm(best)
                best = comm
            else:
                self.factory.destroy_comm(comm)
        if best is None:
            return 0
        size = len(best.ranks)
        self.factory.destroy_comm(best)
        return size

    def smallest(self, candidates):
        best = None
        for ranks in candidates:
            comm = self.factory.create_comm(ranks)  # leak: a beaten best is replaced without being destroyed
            if best is None or len(comm.ranks) < len(best.ranks):
                best = comm
            else:
                self.factory.destroy_comm(comm)
        if best is None:
            return 0
        size = len(best.ranks)
        self.factory.destroy_comm(best)
        return size
