# take: reserve_port()
# give: vacate_port(X)
# gets: value
import random
import threading

PORT_LO, PORT_HI = 29500, 29999
_taken = set()
_portlock = threading.RLock()


class NoPortLeft(OSError):
    """Every rendezvous port of the range has an owner."""


def _candidates():
    ports = [p for p in range(PORT_LO, PORT_HI + 1) if p not in _taken]
    random.shuffle(ports)
    return ports


def reserve_port():
    with _portlock:
        for port in _candidates():
            _taken.add(port)
            return port
    raise NoPortLeft(f"{PORT_LO}-{PORT_HI}")


def vacate_port(port):
    with _portlock:
        _taken.remove(port)
