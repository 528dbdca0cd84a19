"""Scanning of circuit breakers with leased probe addresses."""
import enum


class Reading(enum.Enum):
    OPEN = 0
    CLOSED = 1
    FAULT = 2


class ProbeBus:
    def __init__(self, addresses):
        self._spare = list(addresses)

    def request(self):
        return self._spare.pop() if self._spare else None

    def yield_up(self, address):
        self._spare.append(address)


class Scanner:
    def __init__(self, bus, line):
        self.bus = bus
        self.line = line
        self.faults = []

    def probe(self, breaker):
        address = self.bus.request()  # clean: handed on with the reading
        if address is None:
            return None
        return address, Reading(self.line.read(address, breaker))

    def scan(self, breakers):
        closed = 0
        for breaker in breakers:
            match self.probe(breaker):  # leak: the FAULT case does not yield it up
                case None:
                    break
                case (address, Reading.CLOSED):
                    closed += 1
                    self.bus.yield_up(address)
                case (address, Reading.OPEN):
                    self.bus.yield_up(address)
                case (_, Reading.FAULT):
                    self.faults.append(breaker)
        return closed

    def confirm(self, breaker):
        match self.probe(breaker):  # clean: each case yields it up
            case (address, Reading.FAULT):
                self.line.reset(address)
                self.bus.yield_up(address)
                return False
            case (address, _):
                self.bus.yield_up(address)
                return True
            case None:
                return False

    def trip(self, breaker):
        found = self.probe(breaker)  # clean: indexed and yielded up
        if not found:
            return False
        self.line.trip(found[0], breaker)
        self.bus.yield_up(found[0])
        return found[1] is Reading.CLOSED

    def all_closed(self, breakers):
        return all(self.probe(b)[1] is Reading.CLOSED for b in breakers)  # leak: only the reading is used
