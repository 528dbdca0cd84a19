"""Port numbers for sandboxed test servers, one bit for each port."""
import subprocess

BASE = 20000
WIDTH = 256


class PortMap:
    def __init__(self):
        self._bits = 0

    def claim(self):
        free = ~self._bits & ((1 << WIDTH) - 1)
        if free == 0:
            return None
        low = free & -free
        self._bits |= low
        return BASE + low.bit_length() - 1

    def vacate(self, port):
        self._bits &= ~(1 << (port - BASE))


class Sandbox:
    def __init__(self, ports):
        self.ports = ports
        self.port = None
        self.proc = None

    def up(self, argv):
        self.port = self.ports.claim()  # clean: kept in the sandbox, vacated by down()
        if self.port is not None:
            self.proc = subprocess.Popen(argv + ["--port", str(self.port)])

    def down(self):
        if self.proc is not None:
            self.proc.terminate()
        if self.port is not None:
            self.ports.vacate(self.port)
            self.port = None


def probe(ports, argv):
    port = ports.claim()  # leak: vacated only when the server answers with status 0
    if port is None:
        return False
    rc = subprocess.call(argv + ["--port", str(port)])
    if rc == 0:
        ports.vacate(port)
        return True
    return False


def run_pair(ports, argv):
    left = ports.claim()  # leak: no right port, and the left one stays claimed
    right = ports.claim()  # clean: vacated in finally
    if left is None or right is None:
        if right is not None:
            ports.vacate(right)
        return 1
    try:
        return subprocess.call(argv + [str(left), str(right)])
    finally:
        ports.vacate(left)
        ports.vacate(right)
