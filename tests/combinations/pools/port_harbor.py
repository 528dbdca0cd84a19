# take: P.reserve_port()
# give: P.unreserve_port(X)
# gets: value
# type: PortRange
import random


class PortsExhausted(OSError):
    pass


class PortRange:
    """Rendezvous ports for torchrun launches on one node (bookkeeping only, nothing is bound)."""

    def __init__(self, lo=29500, hi=29600, seed=None):
        self._candidates = frozenset(range(lo, hi))
        self._reserved = set()
        self._rng = random.Random(seed)

    def reserve_port(self):
        open_ports = sorted(self._candidates - self._reserved)
        if not open_ports:
            raise PortsExhausted("no rendezvous port left")
        port = self._rng.choice(open_ports)
        self._reserved.add(port)
        return port

    def unreserve_port(self, port):
        self._reserved.discard(port)
