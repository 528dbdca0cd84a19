"""Sample buffers of an oscilloscope, passed on in named tuples."""
from typing import NamedTuple, Optional


class SampleMemory:
    def __init__(self, banks):
        self._banks = list(banks)

    def check_out_bank(self):
        return self._banks.pop() if self._banks else None

    def check_in_bank(self, bank):
        self._banks.append(bank)


class Capture(NamedTuple):
    channel: int
    bank: Optional[list]
    rate: float
    trigger: float = 0.0


class Scope:
    def __init__(self, memory, adc):
        self.memory = memory
        self.adc = adc
        self.kept = []

    def arm(self, channel, rate):
        return Capture(channel, self.memory.check_out_bank(), rate)  # clean: handed on in the record

    def trigger(self, channel, rate, level):
        cap = self.arm(channel, rate)  # clean: handed on in the changed record
        if cap.bank is not None:
            self.adc.wait(channel, level)
            self.adc.fill(cap.bank, rate)
        return cap._replace(trigger=level)

    def single(self, channel, rate, level):
        cap = self.trigger(channel, rate, level)  # clean: checked in after the copy
        if cap.bank is None:
            return []
        trace = list(cap.bank)
        self.memory.check_in_bank(cap.bank)
        return trace

    def hold(self, channel, rate, level):
        cap = self.trigger(channel, rate, level)  # clean: kept until clear
        if cap.bank is not None:
            self.kept.append(cap)
        return cap.bank is not None

    def clear(self):
        for cap in self.kept:
            self.memory.check_in_bank(cap.bank)
        self.kept.clear()

    def frequency(self, channel, rate, level):
        cap = self.trigger(channel, rate, level)  # leak: no crossing returns with the bank out
        if cap.bank is None:
            return None
        crossings = sum(1 for a, b in zip(cap.bank, cap.bank[1:]) if a < level <= b)
        if crossings == 0:
            return None
        self.memory.check_in_bank(cap.bank)
        return crossings * rate / len(cap.bank)

    def effective_rate(self, channel, wanted):
        channel, _, rate, _ = self.arm(channel, wanted)  # leak: the bank is unpacked into nothing
        return self.adc.round_rate(channel, rate)
