"""Berths of a harbour simulation, held by ship states."""


class Quay:
    def __init__(self, berths):
        self._vacant = list(berths)

    def moor(self):
        return self._vacant.pop() if self._vacant else None

    def cast_off(self, berth):
        self._vacant.append(berth)


class AtSea:
    berth = None

    def next(self, ship):
        berth = ship.quay.moor()  # clean: the next state holds it
        if berth is None:
            ship.waited += 1
            return self
        return Docked(berth)


class Docked:
    def __init__(self, berth):
        self.berth = berth

    def next(self, ship):
        if ship.cargo > 0:
            ship.cargo -= 1
            return self
        ship.quay.cast_off(self.berth)
        return AtSea()


class Hurried(AtSea):
    def next(self, ship):
        berth = ship.quay.moor()  # leak: a ship without cargo sails on, berth and all
        if berth is None:
            return self
        if ship.cargo == 0:
            return AtSea()
        return Docked(berth)


class Ship:
    def __init__(self, quay, cargo):
        self.quay = quay
        self.cargo = cargo
        self.waited = 0
        self.state = AtSea()

    def step(self):
        self.state = self.state.next(self)

    def bunker(self, tons):
        berth = self.quay.moor()  # clean: cast off after the bunkering
        if berth is None:
            return False
        self.cargo += tons
        self.quay.cast_off(berth)
        return True

    def force_dock(self):
        if self.state.berth is not None:
            return False
        berth = self.quay.moor()  # clean: held by the state
        if berth is not None:
            self.state = Docked(berth)
        return berth is not None

    def abandon(self):
        self.cargo = 0
        if isinstance(self.state, Docked):
            self.quay.cast_off(self.state.berth)
        self.state = AtSea()

    def call_at(self, port_fee, purse):
        berth = self.quay.moor()  # leak: the state is built only when the purse suffices
        if berth is None:
            return purse
        if purse >= port_fee:
            self.state = Docked(berth)
            return purse - port_fee
        return purse
