"""Missions of warehouse robots: docks, aisle locks and chargers held by nested records."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal


@dataclass(eq=False)
class Dock:
    code: str
    occupied: bool = False


class DockYard:
    def __init__(self, codes: list[str]) -> None:
        self._docks = [Dock(c) for c in codes]

    def assign(self) -> Dock | None:
        for dock in self._docks:
            if not dock.occupied:
                dock.occupied = True
                return dock
        return None

    def clear(self, dock: Dock) -> None:
        dock.occupied = False


class AisleLocks:
    """Counted locks: several robots of one direction may be in an aisle."""

    def __init__(self) -> None:
        self._count: dict[int, int] = {}

    def enter(self, aisle: int) -> int:
        self._count[aisle] = self._count.get(aisle, 0) + 1
        return aisle

    def exit(self, aisle: int) -> None:
        self._count[aisle] -= 1

    def busy(self) -> list[int]:
        return [a for a, n in self._count.items() if n]


@dataclass
class Leg:
    aisle: int
    dock: Dock | None = None


@dataclass
class Mission:
    mid: int
    legs: deque[Leg] = field(default_factory=deque)
    finished: list[Leg] = field(default_factory=list)


@dataclass
class Robot:
    name: str
    mission: Mission | None = None
    charger: Dock | None = None
    bays: dict[str, Dock] = field(default_factory=dict)


Event = tuple[Literal["arrived", "blocked", "failed"], str]


class Fleet:
    def __init__(self, yard: DockYard, chargers: DockYard, bays: DockYard, aisles: AisleLocks) -> None:
        self.yard = yard
        self.chargers = chargers
        self.bays = bays
        self.aisles = aisles
        self.robots: dict[str, Robot] = {}
        self.log: list[str] = []
        self._mid = 0

    def dispatch(self, robot: Robot, aisles: list[int]) -> bool:
        if robot.mission is not None:
            return False
        self._mid += 1
        mission = Mission(self._mid)
        for aisle in aisles:
            held = self.aisles.enter(aisle)  # clean: near miss, exited on arrival and on failure
            mission.legs.append(Leg(held))
        dock = self.yard.assign()  # leak: a failed mission exits its aisles, its dock stays occupied
        if dock is None or not mission.legs:
            if dock is not None:
                self.yard.clear(dock)
            for leg in mission.legs:
                self.aisles.exit(leg.aisle)
            return False
        mission.legs[-1].dock = dock
        robot.mission = mission
        return True

    def handle(self, event: Event) -> None:
        match event:
            case ("arrived", name):
                robot = self.robots[name]
                if robot.mission is None:
                    return
                leg = robot.mission.legs.popleft()
                self.aisles.exit(leg.aisle)
                if leg.dock is not None:
                    self.yard.clear(leg.dock)
                robot.mission.finished.append(leg)
                if not robot.mission.legs:
                    robot.mission = None
            case ("blocked", name):
                self.log.append(f"{name} waits")
            case ("failed", name):
                robot = self.robots[name]
                mission, robot.mission = robot.mission, None
                if mission is None:
                    return
                while mission.legs:
                    leg = mission.legs.pop()
                    self.aisles.exit(leg.aisle)
                self.log.append(f"mission {mission.mid} failed")

    def charge(self, robot: Robot) -> bool:
        """Sends the robot to a charger, also from one charger to another."""
        charger = self.chargers.assign()  # leak: the charger of before is overwritten in the record
        if charger is None:
            return False
        if robot.charger is not None:
            self.log.append(f"{robot.name} leaves {robot.charger.code}")
        robot.charger = charger
        return True

    def unplug(self, robot: Robot) -> None:
        if robot.charger is not None:
            self.chargers.clear(robot.charger)
            robot.charger = None

    def take_bay(self, robot: Robot, goods: str) -> bool:
        if goods in robot.bays:
            return True
        bay = self.bays.assign()  # clean: near miss, moved by pass_on, cleared at unload
        if bay is None:
            return False
        robot.bays[goods] = bay
        return True

    def pass_on(self, giver: Robot, taker: Robot) -> int:
        moved = 0
        for goods in list(giver.bays):
            bay = giver.bays.pop(goods)
            if goods in taker.bays:
                self.bays.clear(bay)
                continue
            taker.bays[goods] = bay
            moved += 1
        return moved

    def unload(self, robot: Robot) -> int:
        n = 0
        while robot.bays:
            _, bay = robot.bays.popitem()
            self.bays.clear(bay)
            n += 1
        return n


class Convoy:
    """Several docks side by side for one truck; the truck may leave some early."""

    def __init__(self, yard: DockYard) -> None:
        self.yard = yard
        self.docks: list[Dock] = []
        self.reserve: list[Dock] = []

    def widen(self, n: int) -> int:
        for _ in range(n):
            if (dock := self.yard.assign()) is None:  # leak: shrink cuts docks off the end of the list
                break
            self.docks.append(dock)
        return len(self.docks)

    def shrink(self, n: int) -> None:
        del self.docks[n:]

    def back_up(self, n: int) -> int:
        for _ in range(n):
            if (dock := self.yard.assign()) is None:  # clean: near miss, what slim cuts off is cleared first
                break
            self.reserve.append(dock)
        return len(self.reserve)

    def slim(self, n: int) -> None:
        for dock in self.reserve[n:]:
            self.yard.clear(dock)
        self.reserve[n:] = []

    def promote(self) -> str | None:
        if not self.reserve:
            return None
        dock = self.reserve.pop()
        self.reserve.insert(0, dock)
        return dock.code

    def leave(self) -> None:
        for dock in self.docks + self.reserve:
            self.yard.clear(dock)
        self.docks, self.reserve = [], []
