"""Channel lists for a radio telescope's correlator."""


class ChannelBoard:
    def __init__(self, count):
        self._off = set(range(count))

    def switch_on(self, count):
        if len(self._off) < count:
            return []
        return [self._off.pop() for _ in range(count)]

    def switch_off(self, channels):
        self._off.update(channels)


class Observation:
    def __init__(self, board, channels, owned):
        self.board = board
        self.channels = channels
        self.owned = owned
        self.power = []

    def integrate(self, receiver, seconds):
        self.power = [receiver.power(ch, seconds) for ch in self.channels]
        return max(self.power, default=0.0)

    def close(self):
        if self.owned:
            self.board.switch_off(self.channels)
        self.channels = []


class Correlator:
    def __init__(self, board, receiver):
        self.board = board
        self.receiver = receiver
        self.standing = board.switch_on(8)  # clean: kept by the correlator until stop
        self.best = 0.0

    def stop(self):
        self.board.switch_off(self.standing)
        self.standing = []

    def observe(self, channels=None, seconds=1.0):
        owned = channels is None
        if owned:
            channels = self.board.switch_on(4)  # clean: the flag lets close switch them off
        session = Observation(self.board, channels, owned)
        self.best = max(self.best, session.integrate(self.receiver, seconds))
        session.close()
        return self.best

    def survey(self, seconds):
        session = Observation(self.board, self.standing, owned=False)
        peak = session.integrate(self.receiver, seconds)
        session.close()
        return peak

    def burst(self, width, seconds):
        channels = self.board.switch_on(width)  # leak: the session is told that it does not own them
        session = Observation(self.board, channels, owned=False)
        peak = session.integrate(self.receiver, seconds)
        session.close()
        return peak

    def mosaic(self, width, use_standing):
        if use_standing:
            channels = self.standing[:width]
        else:
            channels = self.board.switch_on(width)  # leak: the flag is inverted on this way
        session = Observation(self.board, list(channels), owned=use_standing)
        peak = session.integrate(self.receiver, 0.5)
        session.close()
        return peak

    def noise_floor(self):
        channels = self.board.switch_on(2)  # clean: owned session
        session = Observation(self.board, channels, owned=True)
        floor = session.integrate(self.receiver, 10.0)
        session.close()
        return floor
