"""Cargo lifts of a warehouse; parcels and lifts meet by double dispatch."""


class Lift:
    def __init__(self, limit):
        self.limit = limit
        self.load = []

    def carry(self, parcel):
        return parcel.board(self)


class LiftYard:
    def __init__(self, lifts):
        self._standing = list(lifts)

    def call_lift(self):
        return self._standing.pop() if self._standing else None

    def send_home(self, lift):
        lift.load.clear()
        self._standing.append(lift)


class Parcel:
    def __init__(self, kilos, yard):
        self.kilos = kilos
        self.yard = yard

    def board(self, lift):
        lift.load.append(self)
        self.yard.send_home(lift)
        return True


class FragileParcel(Parcel):
    def board(self, lift):
        lift.load.insert(0, self)
        trip = sum(parcel.kilos for parcel in lift.load)
        self.yard.send_home(lift)
        return trip <= lift.limit / 2


class HeavyParcel(Parcel):
    def board(self, lift):
        if self.kilos > lift.limit:
            return False
        lift.load.append(self)
        self.yard.send_home(lift)
        return True


class Warehouse:
    stuck = 0

    def __init__(self, yard):
        self.yard = yard

    def move_fragile(self, kilos):
        lift = self.yard.call_lift()  # clean: a fragile parcel sends the lift home
        if lift is None:
            return False
        return lift.carry(FragileParcel(kilos, self.yard))

    def move_heavy(self, kilos):
        lift = self.yard.call_lift()  # leak: a refused heavy parcel leaves the lift out
        if lift is None:
            return False
        if lift.carry(HeavyParcel(kilos, self.yard)):
            return True
        self.stuck += 1
        return False

    def move_heavy_split(self, kilos):
        lift = self.yard.call_lift()  # clean: sent home after a refusal
        if lift is None:
            return False
        moved = lift.carry(HeavyParcel(kilos, self.yard))
        if not moved:
            self.stuck += 1
            self.yard.send_home(lift)
        return moved

    def move_plain(self, kilos):
        lift = self.yard.call_lift()  # clean: boards at once
        return lift is not None and lift.carry(Parcel(kilos, self.yard))

    def capacity(self):
        lift = self.yard.call_lift()  # leak: its limit is read, nobody boards
        return lift.limit if lift else 0
