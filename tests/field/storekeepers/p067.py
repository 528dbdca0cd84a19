import asyncio


class LaneLocks:
    def __init__(self, closed):
        self._locked = set(closed)

    def try_lock(self, lane):
        if lane in self._locked:
            return None
        self._locked.add(lane)
        return lane

    def unlock(self, lane):
        self._locked.discard(lane)


class CarPool:
    def __init__(self, names):
        self.cars = list(names)

    def summon(self):
        return self.cars.pop()

    def park(self, car):
        self.cars.append(car)


class Trip:
    def __init__(self, rider, car, lane):
        self.rider = rider
        self.car = car
        self.lane = lane


class Dispatcher:
    def __init__(self, locks, cars):
        self.locks = locks
        self.cars = cars
        self.trips = {}
        self.spare_car = cars.summon()  # clean: close parks it

    async def board(self, rider, lane):
        if rider in self.trips:
            return False
        locked = self.locks.try_lock(lane)  # leak: no_show parks the car and the lane stays locked
        if locked is None:
            return False
        car = self.cars.summon()  # clean: arrive and no_show park it
        self.trips[rider] = Trip(rider, car, locked)
        await asyncio.sleep(0)
        return True

    def arrive(self, rider):
        trip = self.trips.pop(rider, None)
        if trip is None:
            return
        self.cars.park(trip.car)
        self.locks.unlock(trip.lane)

    def no_show(self, rider):
        trip = self.trips.get(rider)
        if trip is None:
            return False
        del self.trips[rider]
        self.cars.park(trip.car)
        return True

    def close(self):
        for rider in list(self.trips):
            self.arrive(rider)
        self.cars.park(self.spare_car)


class Maintenance:
    def __init__(self, locks):
        self.locks = locks
        self.lanes = set()

    def block(self, lanes):
        for lane in lanes:
            if self.locks.try_lock(lane) is not None:  # leak: reopen drops odd ones
                self.lanes.add(lane)

    def reopen(self):
        for lane in sorted(self.lanes):
            if lane % 2 == 0:
                self.locks.unlock(lane)
        self.lanes = set()
