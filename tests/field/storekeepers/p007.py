import heapq
import itertools

_counter = itertools.count()


class Gripper:
    def __init__(self, name):
        self.name = name
        self.width = 0


class GripperRack:
    def __init__(self, names):
        self.rack = [Gripper(n) for n in names]
        self.issued = 0

    def fetch(self):
        self.issued += 1
        return self.rack.pop()

    def stow(self, gripper):
        self.issued -= 1
        gripper.width = 0
        self.rack.append(gripper)


class Planner:
    def __init__(self, rack):
        self.rack = rack
        self.heap = []
        self.log = []

    def schedule(self, when, task):
        gripper = self.rack.fetch()  # leak: run_due skips past-deadline entries without stow
        heapq.heappush(self.heap, (when, next(_counter), gripper, task))

    def run_due(self, now):
        ran = 0
        while self.heap and self.heap[0][0] <= now:
            when, _, gripper, task = heapq.heappop(self.heap)
            if now - when > 5.0:
                self.log.append(("late", task))
                continue
            gripper.width = task.get("width", 10)
            self.log.append(("ran", task))
            ran += 1
            self.rack.stow(gripper)
        return ran


class Cell:
    def __init__(self, rack):
        self.rack = rack
        self.left = rack.fetch()  # clean: stand_down stows both arms
        self.right = rack.fetch()  # clean: stand_down stows both arms
        self.spare = None

    def call_spare(self, width):
        if self.spare is None:
            self.spare = self.rack.fetch()  # leak: exchange swaps the arms and drops the spare
        self.spare.width = width

    def exchange(self):
        if self.spare is None:
            return False
        self.left, self.right = self.right, self.left
        self.left.width = self.spare.width
        self.spare = None
        return True

    def stand_down(self):
        self.rack.stow(self.left)
        self.rack.stow(self.right)
        if self.spare is not None:
            self.rack.stow(self.spare)
            self.spare = None


def calibrate(rack, widths):
    gripper = rack.fetch()  # clean: stowed after the sweep
    seen = []
    for w in widths:
        gripper.width = w
        seen.append(gripper.width)
    rack.stow(gripper)
    return seen
