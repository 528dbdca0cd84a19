"""Modem sessions of a vehicle tracker, built by class methods."""
import time


class ModemBay:
    def __init__(self, modems):
        self._spare = list(modems)

    def wake(self):
        return self._spare.pop()

    def sleep(self, modem):
        modem.power(False)
        self._spare.append(modem)


class Session:
    def __init__(self, bay, modem, label):
        self.bay = bay
        self.modem = modem
        self.label = label
        self.started = time.monotonic()

    @classmethod
    def dial(cls, bay, number):
        modem = bay.wake()  # clean: owned by the session that is returned
        modem.command(f"ATD{number}")
        return cls(bay, modem, number)

    @classmethod
    def text_mode(cls, bay):
        session = cls.dial(bay, "*99#")  # clean: handed to the caller
        session.modem.command("AT+CMGF=1")
        return session

    @staticmethod
    def strength(bay):
        modem = bay.wake()  # clean: put to sleep before the return
        level = int(modem.command("AT+CSQ"))
        bay.sleep(modem)
        return level

    def seconds(self):
        return time.monotonic() - self.started

    def hang_up(self):
        self.modem.command("ATH")
        self.bay.sleep(self.modem)


class Tracker:
    def __init__(self, bay, number):
        self.bay = bay
        self.number = number
        self.sent = 0

    def report(self, fix):
        session = Session.dial(self.bay, self.number)  # clean: hung up
        session.modem.send(repr(fix).encode())
        session.hang_up()
        self.sent += 1
        return session.seconds()

    def alert(self, text):
        session = Session.text_mode(self.bay)  # leak: a refused message returns before the hang-up
        reply = session.modem.command(f"AT+CMGS={text}")
        if "ERROR" in reply:
            return False
        session.hang_up()
        self.sent += 1
        return True

    def connect_time(self):
        return Session.dial(self.bay, self.number).seconds()  # leak: the session is dropped
