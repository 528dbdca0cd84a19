from typing import TypedDict, List


class DockPool:
    def __init__(self, docks):
        self.docks = list(docks)

    def assign(self):
        return self.docks.pop(0)

    def unassign(self, dock):
        self.docks.append(dock)


class Mission(TypedDict):
    drone: str
    home: str
    away: str
    legs: int


class Fleet:
    def __init__(self, docks: DockPool):
        self.docks = docks
        self.missions: List[Mission] = []
        self.grounded: dict = {}

    def launch(self, drone, legs):
        home = self.docks.assign()  # clean: land unassigns both docks, prune keeps unfinished ones
        away = self.docks.assign()  # leak: divert writes a new dock over it
        self.missions.append({"drone": drone, "home": home, "away": away, "legs": legs})

    def divert(self, drone):
        for mission in self.missions:
            if mission["drone"] == drone:
                mission["away"] = self.docks.assign()  # leak: a second divert writes over this one
                mission["legs"] += 1
                return mission["away"]
        return None

    def land(self, drone):
        for i, mission in enumerate(self.missions):
            if mission["drone"] == drone:
                del self.missions[i]
                self.docks.unassign(mission["home"])
                self.docks.unassign(mission["away"])
                return mission["legs"]
        return 0

    def ground(self, drone, reason):
        if drone in self.grounded:
            self.grounded[drone]["reason"] = reason
            return
        dock = self.docks.assign()  # clean: unground hands it back
        self.grounded[drone] = {"dock": dock, "reason": reason}

    def unground(self, drone):
        entry = self.grounded.pop(drone, None)
        if entry is None:
            return ""
        self.docks.unassign(entry["dock"])
        return entry["reason"]

    def inspect(self, drone, look):
        dock = self.docks.assign()  # clean: unassigned below
        report = look(drone, dock)
        self.docks.unassign(dock)
        return report
