"""Uplink airtime shared by the sensors behind an IoT gateway."""
import functools


class AirtimeBook:
    def __init__(self, per_channel_ms):
        self._left = dict(per_channel_ms)

    def draw(self, channel, millis):
        if self._left[channel] < millis:
            return False
        self._left[channel] -= millis
        return True

    def refund(self, channel, millis):
        self._left[channel] += millis


class Uplink:
    BEACON_MS = 12

    def __init__(self, book, radio):
        self.book = book
        self.radio = radio
        self.draw_beacon = functools.partial(book.draw, millis=self.BEACON_MS)
        self.refund_beacon = functools.partial(book.refund, millis=self.BEACON_MS)
        self.deferred = []

    def airtime(self, frame):
        return 3 + len(frame) // 8

    def send(self, channel, frame):
        cost = self.airtime(frame)
        if not self.book.draw(channel, cost):  # clean: refunded after the frame has left
            self.deferred.append((channel, frame))
            return False
        self.radio.transmit(channel, frame)
        self.book.refund(channel, cost)
        return True

    def beacon(self, channel):
        if self.draw_beacon(channel):  # clean: refunded with the same amount
            self.radio.transmit(channel, b"\x01beacon")
            self.refund_beacon(channel)
            return True
        return False

    def beacon_all(self, channels):
        heard = []
        for channel in channels:
            if not self.draw_beacon(channel):  # leak: a quiet channel goes on to the next one
                continue
            self.radio.transmit(channel, b"\x01beacon")
            reply = self.radio.listen(channel)
            if reply is None:
                continue
            heard.append((channel, reply))
            self.refund_beacon(channel)
        return heard

    def flush(self):
        left = []
        for channel, frame in self.deferred:
            cost = self.airtime(frame)
            if self.book.draw(channel, cost):  # clean: refunded in the round
                self.radio.transmit(channel, frame)
                self.book.refund(channel, cost)
            else:
                left.append((channel, frame))
        self.deferred = left

    def has_room(self, channels, frame):
        cost = self.airtime(frame)
        for channel in channels:
            if self.book.draw(channel, cost):  # leak: drawn for the test only
                return True
        return False

    def send_anywhere(self, channels, frame):
        if not self.has_room(channels, frame):
            self.deferred.append((channels[0], frame))
            return False
        return any(self.send(channel, frame) for channel in channels)
