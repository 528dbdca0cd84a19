import threading
from enum import Enum


class Phase(Enum):
    IDLE = 0
    PICK = 1
    CARRY = 2
    PLACE = 3


class ZonePool:
    """Exclusive floor zones and tool heads, by name."""

    def __init__(self, names):
        self._lock = threading.Lock()
        self._free = set(names)

    def enter(self, name):
        with self._lock:
            if name not in self._free:
                return None
            self._free.remove(name)
            return name

    def leave(self, name):
        with self._lock:
            self._free.add(name)


class Robot:
    def __init__(self, zones, tools, name):
        self.zones = zones
        self.tools = tools
        self.name = name
        self.phase = Phase.IDLE
        self.zone = None
        self.tool = None
        self.charger = None

    def begin(self, zone, tool):
        if self.phase is not Phase.IDLE:
            return False
        self.zone = self.zones.enter(zone)  # clean: finish and abort leave the zone
        if self.zone is None:
            return False
        self.tool = self.tools.enter(tool)  # leak: abort leaves the zone and keeps no note of the tool
        if self.tool is None:
            self.zones.leave(self.zone)
            self.zone = None
            return False
        self.phase = Phase.PICK
        return True

    def carry(self, target):
        if self.phase is not Phase.PICK:
            return False
        following = self.zones.enter(target)  # clean: becomes the zone after the old one was left
        if following is None:
            return False
        self.zones.leave(self.zone)
        self.zone = following
        self.phase = Phase.CARRY
        return True

    def finish(self):
        if self.phase is Phase.CARRY:
            self.zones.leave(self.zone)
            self.tools.leave(self.tool)
            self.zone = self.tool = None
            self.phase = Phase.IDLE

    def abort(self):
        if self.zone is not None:
            self.zones.leave(self.zone)
        self.zone = self.tool = None
        self.phase = Phase.IDLE

    def charge(self, station):
        if self.charger is None:
            self.charger = self.zones.enter(station)  # leak: depart forgets it unless the robot is idle
        return self.charger is not None

    def depart(self):
        station, self.charger = self.charger, None
        if self.phase is Phase.IDLE and station is not None:
            self.zones.leave(station)
        return station
