"""Dial-out lines of an alarm centre, freed by events of the exchange."""
import collections


class LineBank:
    def __init__(self, lines):
        self._quiet = collections.deque(lines)

    def seize(self):
        return self._quiet.popleft() if self._quiet else None

    def hang_up(self, line):
        self._quiet.append(line)


class Exchange:
    def __init__(self):
        self._handlers = collections.defaultdict(list)

    def on(self, event, handler):
        self._handlers[event].append(handler)

    def fire(self, event, *args):
        handlers, self._handlers[event] = self._handlers[event], []
        for handler in handlers:
            handler(*args)

    def dial(self, line, number):
        self.fire(f"dialled:{number}", line)


class AlarmCentre:
    def __init__(self, lines, exchange, journal):
        self.lines = lines
        self.exchange = exchange
        self.journal = journal
        self.live = {}

    def _ended(self, number):
        line = self.live.pop(number, None)
        if line is not None:
            self.lines.hang_up(line)

    def call(self, number):
        if number in self.live:
            return False
        line = self.lines.seize()  # clean: stored in live, hung up by the event
        if line is None:
            return False
        self.live[number] = line
        self.exchange.on(f"ended:{number}", lambda: self._ended(number))
        self.exchange.dial(line, number)
        return True

    def call_once(self, number):
        line = self.lines.seize()  # clean: the handler owns and hangs up
        if line is None:
            return False

        def finished():
            self.journal.append(("ended", number))
            self.lines.hang_up(line)

        self.exchange.on(f"ended:{number}", finished)
        self.exchange.dial(line, number)
        return True

    def call_logged(self, number):
        line = self.lines.seize()  # leak: the handler only writes the journal
        if line is None:
            return False
        self.exchange.on(f"ended:{number}", lambda: self.journal.append(("ended", line)))
        self.exchange.dial(line, number)
        return True

    def line_check(self, meter):
        weak = []
        while (line := self.lines.seize()) is not None:  # clean: all are hung up after the sweep
            weak.append((meter.read(line), line))
        for _, line in weak:
            self.lines.hang_up(line)
        return min((level for level, _ in weak), default=None)

    def any_dial_tone(self, meter):
        line = self.lines.seize()  # leak: a silent line is not hung up
        if line is not None and meter.has_tone(line):
            self.lines.hang_up(line)
            return True
        return False
