"""Poll loop of a fieldbus master: one transaction slot is in use at a time."""
import enum
import time


class State(enum.Enum):
    IDLE = "idle"
    SENT = "sent"
    DONE = "done"


class Transactions:
    def __init__(self, count):
        self._open = list(range(count))

    def begin(self):
        return self._open.pop() if self._open else None

    def finish(self, number):
        self._open.append(number)


class Master:
    def __init__(self, transactions, bus):
        self.transactions = transactions
        self.bus = bus
        self.state = State.IDLE
        self.number = None
        self.timeouts = 0

    def _started(self, frame):
        number = self.transactions.begin()  # clean: handed to the caller
        if number is not None:
            self.bus.send(number, frame)
        return number

    def tick(self, frame):
        if self.state is State.IDLE:
            self.number = self._started(frame)  # clean: finished in the state DONE
            if self.number is not None:
                self.state = State.SENT
        elif self.state is State.SENT:
            if self.bus.answered(self.number):
                self.state = State.DONE
        else:
            self.transactions.finish(self.number)
            self.number = None
            self.state = State.IDLE

    def ask(self, frame, seconds):
        number = self._started(frame)  # leak: the deadline breaks the loop, nobody finishes it
        if number is None:
            return None
        end = time.monotonic() + seconds
        while True:
            if self.bus.answered(number):
                answer = self.bus.answer(number)
                self.transactions.finish(number)
                return answer
            if time.monotonic() > end:
                self.timeouts += 1
                break
        return None

    def ask_once(self, frame):
        number = self._started(frame)  # clean: finished whether answered or not
        if number is None:
            return None
        answer = self.bus.answer(number) if self.bus.answered(number) else None
        self.transactions.finish(number)
        return answer

    def notify(self, frames):
        sent = 0
        for frame in frames:
            if self._started(frame) is not None:  # leak: the number is not even kept
                sent += 1
        return sent

    def ping(self):
        number = self.transactions.begin()  # clean: finished
        if number is None:
            return False
        alive = self.bus.ping(number)
        self.transactions.finish(number)
        return alive
