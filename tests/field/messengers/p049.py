"""Bandwidth credits of a replication link: taken in units, given back in units."""
import time


class CreditLine:
    def __init__(self, units):
        self.units = units

    def withdraw(self, count):
        granted = min(count, self.units)
        self.units -= granted
        return granted

    def deposit(self, count):
        self.units += count


class ReplicationLink:
    UNIT = 4096

    def __init__(self, credit, peer):
        self.credit = credit
        self.peer = peer
        self.lag = 0

    def _granted(self, blob):
        return self.credit.withdraw(-(-len(blob) // self.UNIT))  # clean: the count is handed to the caller

    def push(self, blob):
        count = self._granted(blob)  # clean: deposited in full
        sent = self.peer.send(blob[:count * self.UNIT])
        self.credit.deposit(count)
        return sent

    def push_whole(self, blob):
        count = self._granted(blob)  # leak: a partial grant returns with the units withdrawn
        if count * self.UNIT < len(blob):
            self.lag += 1
            return False
        self.peer.send(blob)
        self.credit.deposit(count)
        return True

    def push_whole_or_wait(self, blob, pause):
        count = self._granted(blob)  # clean: deposited before each new try, and at the end
        while count * self.UNIT < len(blob):
            self.credit.deposit(count)
            time.sleep(pause)
            count = self._granted(blob)  # clean: like the first
        self.peer.send(blob)
        self.credit.deposit(count)

    def heartbeat(self):
        units = self.credit.withdraw(1)  # clean: deposited
        alive = self.peer.ping() if units else False
        self.credit.deposit(units)
        return alive

    def push_top_up(self, blob):
        count = self._granted(blob)  # clean: deposited
        extra = self.credit.withdraw(2)  # leak: only the first count is deposited
        self.peer.send(blob[:(count + extra) * self.UNIT])
        self.credit.deposit(count)
        return count + extra
