"""I2C buses behind a multiplexer: one master at a time, reentrant for its own thread."""
import threading


class BusArbiter:
    def __init__(self, count):
        self._holder = [None] * count
        self._depth = [0] * count
        self._cv = threading.Condition()

    def grab_bus(self, bus):
        me = threading.get_ident()
        with self._cv:
            while self._holder[bus] not in (None, me):
                self._cv.wait()
            self._holder[bus] = me
            self._depth[bus] += 1

    def let_bus(self, bus):
        with self._cv:
            self._depth[bus] -= 1
            if self._depth[bus] == 0:
                self._holder[bus] = None
                self._cv.notify_all()


class Sensor:
    def __init__(self, arbiter, bus, addr, smbus):
        self.arbiter = arbiter
        self.bus = bus
        self.addr = addr
        self.smbus = smbus

    def read_word(self, reg):
        self.arbiter.grab_bus(self.bus)  # clean: let go in finally
        try:
            return self.smbus.read(self.addr, reg, 2)
        finally:
            self.arbiter.let_bus(self.bus)

    def read_when_ready(self, reg, tries):
        self.arbiter.grab_bus(self.bus)  # leak: the ready branch returns inside the loop
        for _ in range(tries):
            if self.smbus.read(self.addr, 0, 1)[0] & 1:
                return self.smbus.read(self.addr, reg, 2)
        self.arbiter.let_bus(self.bus)
        return None

    def configure(self, table):
        self.arbiter.grab_bus(self.bus)  # clean: let go after the table is written
        for reg, value in table:
            self.smbus.write(self.addr, reg, value)
        self.arbiter.let_bus(self.bus)

    def update_bits(self, reg, mask, value):
        self.arbiter.grab_bus(self.bus)  # leak: an unchanged register returns with the bus held
        old = self.smbus.read(self.addr, reg, 1)[0]
        if old & mask == value:
            return False
        self.smbus.write(self.addr, reg, old & ~mask | value)
        self.arbiter.let_bus(self.bus)
        return True
