import threading


class Semaphores:
    """Named permits with a lock around the counts."""

    def __init__(self, counts):
        self._counts = dict(counts)
        self._lock = threading.Lock()

    def down(self, name):
        with self._lock:
            if self._counts[name] == 0:
                return False
            self._counts[name] -= 1
            return True

    def up(self, name):
        with self._lock:
            self._counts[name] += 1


class Crane:
    def __init__(self, semaphores, berth):
        self.semaphores = semaphores
        self.berth = berth
        self.has_crane = False
        self.has_truck = False
        self.moved = 0

    def start(self):
        if not self.has_crane:
            self.has_crane = self.semaphores.down("crane")  # clean: stop ups it
        if self.has_crane and not self.has_truck:
            self.has_truck = self.semaphores.down("truck")  # leak: stop resets the flag before it looks
        return self.has_crane and self.has_truck

    def move(self, containers):
        if self.has_crane and self.has_truck:
            self.moved += containers
        return self.moved

    def stop(self):
        truck = self.has_truck = False
        if truck:
            self.semaphores.up("truck")
        if self.has_crane:
            self.semaphores.up("crane")
            self.has_crane = False


class Pilot:
    def __init__(self, semaphores):
        self.semaphores = semaphores
        self.ships = {}
        self.waiting = []

    def guide(self, ship):
        if ship in self.ships:
            return True
        if not self.semaphores.down("pilot"):  # clean: moored ups it, whatever the tug
            self.waiting.append(ship)
            return False
        self.ships[ship] = {"tug": False}
        return True

    def add_tug(self, ship):
        entry = self.ships[ship]
        if entry["tug"]:
            return True
        entry["tug"] = self.semaphores.down("tug")  # leak: moored removes the entry and ups the pilot alone
        return entry["tug"]

    def moored(self, ship):
        if self.ships.pop(ship, None) is not None:
            self.semaphores.up("pilot")
        if self.waiting:
            self.guide(self.waiting.pop(0))

    def survey(self, depth):
        if not self.semaphores.down("pilot"):  # clean: upped below
            return None
        level = depth()
        self.semaphores.up("pilot")
        return level
