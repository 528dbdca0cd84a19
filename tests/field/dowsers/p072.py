"""Hardware performance counters: few exist, a set of names must be programmed together."""


class CounterUnit:
    def __init__(self, pmu, n=4):
        self.pmu = pmu
        self.registers = dict.fromkeys(range(n))

    def program(self, *events):
        empty = [r for r, e in self.registers.items() if e is None]
        if len(empty) < len(events):
            return ()
        used = tuple(empty[:len(events)])
        for reg, event in zip(used, events):
            self.registers[reg] = event
            self.pmu.select(reg, event)
        return used

    def clear(self, used):
        for reg in used:
            self.pmu.select(reg, None)
            self.registers[reg] = None

    def read(self, used):
        return [self.pmu.value(r) for r in used]


class KernelProfiler:
    def __init__(self, unit: CounterUnit):
        self.unit = unit
        self.used = ()

    def profile(self, kernel, *args):
        used = self.unit.program("dram_read", "dram_write")  # clean: cleared in finally
        try:
            kernel(*args)
            return self.unit.read(used)
        finally:
            self.unit.clear(used)

    def occupancy(self, kernel, *args):
        used = self.unit.program("warps", "cycles")  # leak: zero cycles returns without clear
        if not used:
            return None
        kernel(*args)
        warps, cycles = self.unit.read(used)
        if cycles == 0:
            return 0.0
        self.unit.clear(used)
        return warps / cycles

    def start(self, *events):
        self.used = self.unit.program(*events)  # clean: stop() clears
        return bool(self.used)

    def stop(self):
        values = self.unit.read(self.used)
        self.unit.clear(self.used)
        self.used = ()
        return values

    def sweep(self, events, kernel):
        table = {}
        for event in events:
            used = self.unit.program(event)  # leak: overwritten in each turn, nothing cleared
            kernel()
            table[event] = self.unit.read(used)
        return table
