"""Work hand-over between a feeder thread and pickers in a sorting hall."""
import collections
import threading


class ToteYard:
    def __init__(self, totes):
        self._clean = collections.deque(totes)

    def pull(self):
        return self._clean.popleft() if self._clean else None

    def push(self, tote):
        self._clean.append(tote)


class Feeder:
    def __init__(self, yard, limit):
        self.yard = yard
        self.limit = limit
        self.filled = collections.deque()
        self.ready = threading.Event()
        self.overflow = 0

    def feed(self, items):
        tote = self.yard.pull()  # clean: the picker pushes it
        if tote is None:
            self.overflow += len(items)
            return False
        tote.items = list(items)
        self.filled.append(tote)
        self.ready.set()
        return True

    def feed_if_room(self, items):
        tote = self.yard.pull()  # leak: the line is at its limit, the tote is left
        if tote is None:
            return False
        tote.items = list(items)
        room = len(self.filled) < self.limit
        if room:
            self.filled.append(tote)
            self.ready.set()
        else:
            self.overflow += len(items)
        return room

    def feed_front(self, items):
        tote = self.yard.pull()  # clean: handed over at the front
        if tote is not None:
            tote.items = list(items)
            self.filled.appendleft(tote)
            self.ready.set()

    def tare(self, scale):
        tote = self.yard.pull()  # clean: pushed after the weighing
        if tote is None:
            return 0.0
        grams = scale.weigh(tote)
        self.yard.push(tote)
        return grams


class Picker:
    def __init__(self, yard, feeder):
        self.yard = yard
        self.feeder = feeder
        self.picked = 0

    def pick(self, timeout):
        if not self.feeder.ready.wait(timeout):
            return 0
        while self.feeder.filled:
            tote = self.feeder.filled.popleft()
            self.picked += len(tote.items)
            tote.items = []
            self.yard.push(tote)
        self.feeder.ready.clear()
        return self.picked

    def swap(self, other):
        spare = self.yard.pull()  # leak: the swapped totes are counted, neither is pushed
        if spare is None:
            return 0
        spare.items, other.items = other.items, []
        return len(spare.items)
