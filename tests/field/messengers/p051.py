"""Undoable commands of a stage-light console; each command may hold a dimmer."""


class DimmerRack:
    def __init__(self, count):
        self._free = set(range(count))
        self.level = [0] * count

    def patch(self):
        return self._free.pop() if self._free else None

    def unpatch(self, dimmer):
        self.level[dimmer] = 0
        self._free.add(dimmer)


class Command:
    def __init__(self, rack):
        self.rack = rack
        self.dimmer = None

    def do(self):
        return True

    def undo(self):
        pass


class FadeUp(Command):
    def do(self):
        self.dimmer = self.rack.patch()  # clean: held by the command until undo
        if self.dimmer is None:
            return False
        self.rack.level[self.dimmer] = 255
        return True

    def undo(self):
        if self.dimmer is not None:
            self.rack.unpatch(self.dimmer)
            self.dimmer = None


class Blink(Command):
    def do(self):
        dimmer = self.rack.patch()  # clean: unpatched in the same step
        if dimmer is None:
            return False
        self.rack.level[dimmer] = 255
        self.rack.unpatch(dimmer)
        return True


class Strobe(Command):
    rate = 10

    def do(self):
        dimmer = self.rack.patch()  # leak: kept in a local, undo has nothing to unpatch
        if dimmer is None:
            return False
        self.rack.level[dimmer] = self.rate
        return True

    def undo(self):
        self.rate = 0


class Crossfade(Command):
    other = None

    def do(self):
        self.dimmer = self.rack.patch()  # clean: undo ends it
        self.other = self.rack.patch()  # leak: undo ends the first one only
        return self.dimmer is not None and self.other is not None

    def undo(self):
        if self.dimmer is not None:
            self.rack.unpatch(self.dimmer)
        self.dimmer = None


def perform(commands):
    done = []
    for command in commands:
        if command.do():
            done.append(command)
        else:
            command.undo()
    while done:
        done.pop().undo()
