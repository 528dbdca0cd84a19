import weakref


class Bay:
    def __init__(self, label):
        self.label = label
        self.meter = 0


class Garage:
    def __init__(self, labels):
        self.vacant = [Bay(x) for x in labels]

    def occupy(self):
        return self.vacant.pop()

    def vacate(self, bay):
        bay.meter = 0
        self.vacant.append(bay)


class Car:
    def __init__(self, plate):
        self.plate = plate
        self.bay = None


class Desk:
    """Bays are found by plate and by permit; cars hold their bay themselves."""

    def __init__(self, garage):
        self.garage = garage
        self.by_plate = {}
        self.by_permit = {}
        self.known = weakref.WeakValueDictionary()
        self.valet = []

    def enter(self, car):
        if car.bay is None:
            car.bay = self.garage.occupy()  # leak: tow drops the plate and sets the car's bay to None
            self.by_plate[car.plate] = car
            self.known[car.plate] = car
        return car.bay.label

    def leave(self, car):
        bay, car.bay = car.bay, None
        self.by_plate.pop(car.plate, None)
        if bay is None:
            return 0
        due = bay.meter * 2
        self.garage.vacate(bay)
        return due

    def tow(self, plate):
        car = self.by_plate.pop(plate, None)
        if car is None:
            return False
        car.bay = None
        return plate in self.known

    def buy_permit(self, holder):
        if holder in self.by_permit:
            return self.by_permit[holder].label
        bay = self.garage.occupy()  # clean: end_permit vacates it
        self.by_permit[holder] = bay
        return bay.label

    def transfer_permit(self, old, new):
        if new not in self.by_permit and old in self.by_permit:
            self.by_permit[new] = self.by_permit.pop(old)

    def end_permit(self, holder):
        if holder in self.by_permit:
            self.garage.vacate(self.by_permit.pop(holder))

    def take_key(self, plate):
        self.valet.append((plate, self.garage.occupy()))  # leak: return_key removes the pair without vacate

    def return_key(self, plate):
        for entry in self.valet:
            if entry[0] == plate:
                self.valet.remove(entry)
                return entry[1].label
        return None

    def inspect(self, look):
        bay = self.garage.occupy()  # clean: vacated below
        ok = look(bay.label)
        self.garage.vacate(bay)
        return ok
