class Spindle:
    def __init__(self, number):
        self.number = number
        self.speed = 0
        self.tool = None


class SpindlePool:
    def __init__(self, n):
        self._parked = [Spindle(i) for i in range(n)]

    def engage(self):
        return self._parked.pop()

    def disengage(self, spindle):
        spindle.speed = 0
        self._parked.append(spindle)


class Program:
    def __init__(self, name, steps):
        self.name = name
        self.steps = steps
        self.spindle = None
        self.helper = None


class Mill:
    def __init__(self, pool, width):
        self.pool = pool
        self.width = width
        self.pending = []
        self.active = {}
        self.coolant = pool.engage()  # clean: power_off disengages it

    def queue_program(self, program):
        if program.name in self.active:
            return
        program.spindle = self.pool.engage()  # leak: activate forgets the programs beyond the width
        self.pending.append(program)

    def activate(self):
        room = self.width - len(self.active)
        for program in self.pending[:room]:
            self.active[program.name] = program
        self.pending = []

    def step(self, name):
        program = self.active[name]
        if not program.steps:
            return self.complete(name)
        kind, speed = program.steps.pop(0)
        if kind == "dual" and program.helper is None:
            program.helper = self.pool.engage()  # clean: complete disengages spindle and helper
        program.spindle.speed = speed
        return True

    def complete(self, name):
        program = self.active.pop(name)
        self.pool.disengage(program.spindle)
        if program.helper is not None:
            self.pool.disengage(program.helper)
        program.spindle = program.helper = None
        return False

    def power_off(self):
        for name in list(self.active):
            self.complete(name)
        self.pool.disengage(self.coolant)


class ToolSetter:
    def __init__(self, pool):
        self.pool = pool
        self.held = None

    def mount(self, tool):
        if self.held is None:
            self.held = self.pool.engage()  # leak: eject without a tool sets it to None
        self.held.tool = tool

    def eject(self):
        spindle, self.held = self.held, None
        if spindle is None or spindle.tool is None:
            return None
        tool, spindle.tool = spindle.tool, None
        self.pool.disengage(spindle)
        return tool
