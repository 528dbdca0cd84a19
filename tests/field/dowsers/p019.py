"""A protocol for communicator handles, with one implementation."""
from typing import Optional, Protocol


class CommSource(Protocol):
    def lend(self, group: str) -> Optional[int]: ...

    def reclaim(self, group: str, comm: int) -> None: ...


class NcclComms:
    def __init__(self, per_group):
        self._per_group = per_group
        self._spare = {}
        self._made = {}

    def lend(self, group):
        spare = self._spare.setdefault(group, [])
        if spare:
            return spare.pop()
        made = self._made.get(group, 0)
        if made >= self._per_group:
            return None
        self._made[group] = made + 1
        return hash((group, made))

    def reclaim(self, group, comm):
        self._spare[group].append(comm)


class Collective:
    def __init__(self, comms: CommSource, lib):
        self.comms = comms
        self.lib = lib

    def all_gather(self, tensor, group="tp"):
        comm = self.comms.lend(group)  # clean: reclaimed in finally
        if comm is None:
            return None
        try:
            return self.lib.all_gather(comm, tensor)
        finally:
            self.comms.reclaim(group, comm)

    def reduce_scatter(self, tensor, group):
        comm = self.comms.lend(group)  # leak: an indivisible shape returns with the communicator
        if comm is None or tensor.rows % self.lib.size(group):
            return self.lib.pad(tensor)
        out = self.lib.reduce_scatter(comm, tensor)
        self.comms.reclaim(group, comm)
        return out

    def barrier(self, groups):
        for group in groups:
            comm = self.comms.lend(group)  # leak: break on a timeout keeps it
            if comm is None:
                continue
            if not self.lib.barrier(comm):
                break
            self.comms.reclaim(group, comm)

    def sendrecv(self, a, b):
        comm = self.comms.lend("pp")  # clean: reclaimed after the exchange
        if comm is not None:
            self.lib.sendrecv(comm, a, b)
            self.comms.reclaim("pp", comm)


def build(lib):
    return Collective(NcclComms(per_group=2), lib)
