"""Landing pads of a delivery drone hub."""
import heapq


class PadField:
    def __init__(self, pads):
        self._open = list(pads)

    def hold_pad(self):
        return self._open.pop() if self._open else None

    def clear_pad(self, pad):
        self._open.append(pad)


class Drone:
    def __init__(self, ident, charge, mass):
        self.ident = ident
        self.charge = charge
        self.mass = mass
        self.pad = None

    def accept(self, pad):
        """Keeps the pad, or gives it straight back to the caller."""
        if self.pad is not None or self.mass > pad.limit:
            return pad
        self.pad = pad
        return None


class Hub:
    def __init__(self, field):
        self.field = field
        self.inbound = []
        self.diverted = []

    def announce(self, drone):
        heapq.heappush(self.inbound, (drone.charge, drone.ident, drone))

    def land_next(self):
        if not self.inbound:
            return None
        pad = self.field.hold_pad()  # clean: what accept gives back is cleared
        if pad is None:
            return None
        _, _, drone = heapq.heappop(self.inbound)
        left = drone.accept(pad)
        if left is not None:
            self.diverted.append(drone.ident)
            self.field.clear_pad(left)
        return drone

    def land_emergency(self, drone):
        pad = self.field.hold_pad()  # leak: the pad that accept gives back is ignored
        if pad is None:
            return False
        drone.accept(pad)
        return drone.pad is pad

    def land_first_fit(self, drone):
        rejected = []
        while (pad := self.field.hold_pad()) is not None:  # clean: kept by the drone or cleared below
            pad = drone.accept(pad)
            if pad is None:
                break
            rejected.append(pad)
        for pad in rejected:
            self.field.clear_pad(pad)
        return drone.pad

    def land_all(self, drones):
        spare = self.field.hold_pad()  # leak: still held when the last drone declines it
        for drone in drones:
            if spare is None:
                break
            spare = drone.accept(spare)
        return [drone.ident for drone in drones if drone.pad is None]

    def depart(self, drone):
        pad, drone.pad = drone.pad, None
        if pad is not None:
            self.field.clear_pad(pad)
