from collections import OrderedDict
from dataclasses import dataclass


@dataclass
class Tile:
    slot: int
    level: int
    pinned: bool = False


class AtlasSlots:
    def __init__(self, side):
        self.side = side
        self._open = list(range(side * side))

    def place(self):
        return self._open.pop() if self._open else -1

    def unplace(self, slot):
        self._open.append(slot)


class TileCache:
    def __init__(self, slots, limit):
        self.slots = slots
        self.limit = limit
        self.lru = OrderedDict()
        self.overlay = -1

    def show(self, x, y, level, paint):
        key = (x, y)
        tile = self.lru.get(key)
        if tile is not None and tile.level == level:
            self.lru.move_to_end(key)
            return tile.slot
        slot = self.slots.place()  # leak: a tile of another level is overwritten under the same key
        if slot < 0:
            return -1
        paint(slot, x, y, level)
        self.lru[key] = Tile(slot, level)
        self._shrink()
        return slot

    def _shrink(self):
        for key in list(self.lru):
            if len(self.lru) <= self.limit:
                break
            if not self.lru[key].pinned:
                self.slots.unplace(self.lru.pop(key).slot)

    def pin(self, x, y, flag):
        if (x, y) in self.lru:
            self.lru[x, y].pinned = flag

    def set_overlay(self, paint):
        if self.overlay < 0:
            self.overlay = self.slots.place()  # clean: clear unplaces it
        if self.overlay >= 0:
            paint(self.overlay, 0, 0, 0)

    def clear(self):
        for tile in self.lru.values():
            self.slots.unplace(tile.slot)
        self.lru.clear()
        if self.overlay >= 0:
            self.slots.unplace(self.overlay)
            self.overlay = -1


class Minimap:
    def __init__(self, slots):
        self.slots = slots
        self.marks = {}

    def mark(self, unit, pinned):
        if unit not in self.marks:
            self.marks[unit] = Tile(self.slots.place(), 0, pinned)  # leak: sweep skips pinned marks
        return self.marks[unit]

    def sweep(self):
        for tile in self.marks.values():
            if tile.pinned:
                continue
            self.slots.unplace(tile.slot)
        self.marks.clear()
