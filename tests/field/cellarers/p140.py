"""GPIO pins: a consumer claims a pin with a direction."""
import enum


class Direction(enum.Enum):
    IN = "in"
    OUT = "out"


class PinController:
    def __init__(self, pins):
        self._free = set(pins)
        self._claimed = {}

    def claim_pin(self, pin, direction, label):
        if pin not in self._free:
            raise ValueError(f"pin {pin} is claimed by {self._claimed[pin]}")
        self._free.discard(pin)
        self._claimed[pin] = (label, direction)
        return pin

    def relinquish_pin(self, pin):
        del self._claimed[pin]
        self._free.add(pin)


class Led:
    def __init__(self, ctl, pin):
        self.ctl = ctl
        self.pin = ctl.claim_pin(pin, Direction.OUT, "led")  # clean: relinquished in off()

    def off(self):
        self.ctl.relinquish_pin(self.pin)


def read_button(ctl, regs, pin):
    ctl.claim_pin(pin, Direction.IN, "button")  # clean: relinquished in finally
    try:
        return regs.level(pin)
    finally:
        ctl.relinquish_pin(pin)


def read_dht(ctl, regs, pin):
    ctl.claim_pin(pin, Direction.IN, "dht")  # leak: a wrong checksum returns with the pin claimed
    bits = regs.sample(pin, 40)
    if sum(bits[:4]) & 0xFF != bits[4]:
        return None
    ctl.relinquish_pin(pin)
    return bits[0], bits[2]


def pulse(ctl, regs, trigger, echo):
    ctl.claim_pin(trigger, Direction.OUT, "trig")  # clean: relinquished below
    ctl.claim_pin(echo, Direction.IN, "echo")  # leak: the trigger is relinquished, the echo pin is not
    regs.set(trigger, 1)
    t = regs.time_high(echo)
    ctl.relinquish_pin(trigger)
    return t
