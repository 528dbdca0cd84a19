"""Simulation of a car wash; each wash enters several contexts."""
from contextlib import ExitStack


class Bays:
    def __init__(self, count):
        self._open = list(range(count))

    def drive_in(self):
        return self._open.pop() if self._open else None

    def drive_out(self, bay):
        self._open.append(bay)


class InBay:
    def __init__(self, bays):
        self.bays = bays
        self.bay = None

    def __enter__(self):
        self.bay = self.bays.drive_in()  # clean: __exit__ drives out if there was a bay
        return self.bay

    def __exit__(self, *exc):
        if self.bay is not None:
            self.bays.drive_out(self.bay)
            self.bay = None
        return False


class Wash:
    def __init__(self, bays, pumps):
        self.bays = bays
        self.pumps = pumps
        self.stack = ExitStack()
        self.done = 0

    def quick(self, plate):
        with InBay(self.bays) as bay:  # clean: exits with the block, with or without a bay
            if bay is None:
                return False
            self.pumps.spray(bay, plate)
            self.done += 1
            return True

    def convoy(self, plates):
        with ExitStack() as stack:
            for plate in plates:
                bay = stack.enter_context(InBay(self.bays))  # clean: the stack exits all of them
                if bay is None:
                    return False
                self.pumps.spray(bay, plate)
        self.done += len(plates)
        return True

    def reserve(self):
        return self.stack.enter_context(InBay(self.bays))  # clean: kept until close_shop

    def close_shop(self):
        self.stack.close()
        return self.done

    def soak(self, plate, minutes):
        stack = ExitStack()
        bay = stack.enter_context(InBay(self.bays))  # leak: a dry pump returns, the stack is never closed
        if bay is None:
            return 0
        if not self.pumps.soak(bay, plate, minutes):
            return 0
        stack.close()
        return minutes

    def estimate(self, plate):
        bay = self.bays.drive_in()  # leak: an empty plate returns a default
        if bay is None:
            return None
        if not plate:
            return 10
        minutes = self.pumps.estimate(bay, plate)
        self.bays.drive_out(bay)
        return minutes
