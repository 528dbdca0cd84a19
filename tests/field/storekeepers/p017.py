import threading


class LaneTable:
    def __init__(self, lanes):
        self.mutex = threading.Lock()
        self.idle = list(range(lanes))

    def occupy(self):
        with self.mutex:
            return self.idle.pop(0)

    def leave(self, lane):
        with self.mutex:
            self.idle.append(lane)


class Conveyor:
    """Three parallel lists: parcel, lane and weight share an index."""

    def __init__(self, table):
        self.table = table
        self.parcels = []
        self.lanes = []
        self.weights = []
        self.reserve_lane = table.occupy()  # clean: shut leaves it

    def load(self, parcel, weight):
        lane = self.table.occupy()  # leak: reject removes the entry without leaving the lane
        self.parcels.append(parcel)
        self.lanes.append(lane)
        self.weights.append(weight)
        return len(self.parcels)

    def unload(self, parcel):
        at = self.parcels.index(parcel)
        self.table.leave(self.lanes[at])
        del self.parcels[at], self.lanes[at], self.weights[at]

    def reject(self, limit):
        keep = [i for i, w in enumerate(self.weights) if w <= limit]
        dropped = len(self.weights) - len(keep)
        self.parcels = [self.parcels[i] for i in keep]
        self.lanes = [self.lanes[i] for i in keep]
        self.weights = [self.weights[i] for i in keep]
        return dropped

    def shut(self):
        for lane in self.lanes:
            self.table.leave(lane)
        self.parcels, self.lanes, self.weights = [], [], []
        self.table.leave(self.reserve_lane)


class Sorter:
    def __init__(self, table):
        self.table = table
        self.codes = []
        self.lanes = []

    def assign(self, code):
        lane = self.table.occupy()  # leak: zip with the shorter list stops before the late lanes
        self.lanes.append(lane)
        if code:
            self.codes.append(code)

    def drain(self):
        out = []
        for code, lane in zip(self.codes, self.lanes):
            out.append((code, lane))
            self.table.leave(lane)
        self.codes, self.lanes = [], []
        return out

    def express(self, code):
        lane = self.table.occupy()  # clean: left below
        route = "%s@%d" % (code, lane)
        self.table.leave(lane)
        return route
