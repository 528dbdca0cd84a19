"""Print spooler of an office floor: bounded heaps of documents, each holding a paper tray."""
import heapq
import itertools
from dataclasses import dataclass, field


@dataclass
class Tray:
    number: int
    sheets: int = 250


class TrayRack:
    def __init__(self, count):
        self._ready = [Tray(i) for i in range(count)]
        self._spare_numbers = itertools.count(count)
        self._out = {}

    def draw(self):
        tray = self._ready.pop() if self._ready else Tray(next(self._spare_numbers))
        self._out[tray.number] = tray
        return tray

    def hand_back(self, tray):
        self._out.pop(tray.number)
        self._ready.append(tray)


@dataclass(order=True)
class Entry:
    weight: int
    serial: int
    title: str = field(compare=False)
    owner: str = field(compare=False)
    tray: Tray = field(compare=False)
    tries: int = field(default=0, compare=False)


class Spool:
    """Light entries are bumped when a heap is full; the owner is told and may send the document again."""

    def __init__(self, rack, printer, limit=64, shelf=20):
        self._rack = rack
        self._printer = printer
        self._limit = limit
        self._shelf_size = shelf
        self._serial = itertools.count()
        self._bulk = []
        self._express = []
        self._proofs = []
        self._held = []
        self._shelf = []
        self._archive = []
        self.notices = []

    def _entry(self, title, owner, weight, tray):
        return Entry(weight, next(self._serial), title, owner, tray)

    def submit(self, title, owner, weight):
        entry = self._entry(title, owner, weight, self._rack.draw())  # leak: a bumped entry is only announced
        if len(self._bulk) < self._limit:
            heapq.heappush(self._bulk, entry)
            return True
        bumped = heapq.heappushpop(self._bulk, entry)
        self.notices.append((bumped.owner, f"{bumped.title} was bumped"))
        return bumped is not entry

    def submit_express(self, title, owner, weight):
        entry = self._entry(title, owner, weight, self._rack.draw())  # clean: near miss, bumped trays go back
        if len(self._express) < self._limit:
            heapq.heappush(self._express, entry)
            return True
        bumped = heapq.heappushpop(self._express, entry)
        self._rack.hand_back(bumped.tray)
        self.notices.append((bumped.owner, f"{bumped.title} was bumped"))
        return bumped is not entry

    def run_express(self):
        while self._express:
            entry = heapq.heappop(self._express)
            self._printer.send(entry.title, entry.tray.number)
            self._rack.hand_back(entry.tray)

    def run_bulk(self, pages):
        while self._bulk and pages > 0:
            entry = heapq.heappop(self._bulk)
            self._printer.send(entry.title, entry.tray.number)
            pages -= entry.weight
            self._rack.hand_back(entry.tray)
        return pages

    def proof(self, title, owner):
        tray = self._rack.draw()  # leak: withdraw deletes the entry from the list with its tray
        self._proofs.append(self._entry(title, owner, 1, tray))

    def withdraw(self, owner):
        for i, entry in enumerate(self._proofs):
            if entry.owner == owner:
                del self._proofs[i]
                return entry.title
        return None

    def run_proofs(self):
        for entry in self._proofs:
            self._printer.send(entry.title, entry.tray.number)
            self._rack.hand_back(entry.tray)
        self._proofs.clear()

    def hold(self, title, owner, weight):
        tray = self._rack.draw()  # clean: near miss, deleted in place by drop_held after its tray went back
        self._held.append(self._entry(title, owner, weight, tray))

    def drop_held(self, owner):
        for i in reversed(range(len(self._held))):
            if self._held[i].owner == owner:
                self._rack.hand_back(self._held[i].tray)
                del self._held[i]

    def try_once(self, title, owner):
        tray = self._rack.draw()  # leak: the failed entry goes to the shelf, whose slice cuts off
        if self._printer.send(title, tray.number):
            self._rack.hand_back(tray)
            return True
        self._shelf.append(self._entry(title, owner, 1, tray))
        self._shelf = self._shelf[-self._shelf_size:]
        return False

    def retry_shelf(self):
        stuck, self._shelf = self._shelf, []
        for entry in stuck:
            entry.tries += 1
            if self._printer.send(entry.title, entry.tray.number):
                self._rack.hand_back(entry.tray)
            else:
                self._shelf.append(entry)

    def keep_original(self, title, owner):
        tray = self._rack.draw()  # clean: near miss, what the slice cuts off is handed back before
        self._archive.append(self._entry(title, owner, 1, tray))
        surplus = self._archive[: -self._shelf_size]
        for entry in surplus:
            self._rack.hand_back(entry.tray)
        self._archive = self._archive[-self._shelf_size:]
        return len(surplus)

    def empty_archive(self):
        while self._archive:
            self._rack.hand_back(self._archive.pop().tray)

    def calibrate(self, rounds):
        trays = [self._rack.draw() for _ in range(rounds)]  # leak: only trays that passed are handed back
        passed = [t for t in trays if self._printer.measure(t.number) > 0.9]
        for tray in passed:
            self._rack.hand_back(tray)
        return len(passed) / rounds

    def inspect(self, rounds):
        trays = [self._rack.draw() for _ in range(rounds)]  # clean: near miss, the filter only counts
        low = [t for t in trays if t.sheets < 50]
        for tray in trays:
            self._rack.hand_back(tray)
        return len(low)
