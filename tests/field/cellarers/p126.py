import os
import threading
from abc import ABC, abstractmethod


class InstrumentRack(ABC):
    def __init__(self, addresses):
        self._closed = list(addresses)
        self._ready = {}
        self._guard = threading.RLock()

    @abstractmethod
    def _open(self, address):
        ...

    def engage(self):
        with self._guard:
            if self._ready:
                return self._ready.popitem()[1]
            return self._open(self._closed.pop(0))

    def disengage(self, inst):
        self._ready[inst.address] = inst


class TtyPort:
    def __init__(self, address, fd):
        self.address = address
        self.fd = fd

    def ask(self, line):
        os.write(self.fd, line + b"\n")
        return os.read(self.fd, 256)


class TtyRack(InstrumentRack):
    def _open(self, address):
        return TtyPort(address, os.open(address, os.O_RDWR | os.O_NOCTTY))


class Bench:
    def __init__(self, rack: InstrumentRack):
        self.rack = rack

    def identify(self):
        port = self.rack.engage()  # clean: disengaged in finally
        try:
            return port.ask(b"*IDN?")
        finally:
            self.rack.disengage(port)

    def voltage(self):
        port = self.rack.engage()  # leak: an overload answer returns with the port engaged
        answer = port.ask(b"MEAS:VOLT?")
        if answer.startswith(b"OVLD"):
            return float("inf")
        self.rack.disengage(port)
        return float(answer)


def selftest(rack: TtyRack, rounds):
    port = rack.engage()  # clean: disengaged after all rounds
    passed = sum(port.ask(b"*TST?").startswith(b"0") for _ in range(rounds))
    rack.disengage(port)
    return passed


def reset_all(rack: TtyRack, n):
    for _ in range(n):
        rack.engage().ask(b"*RST")  # leak: the port is used in place and lost
