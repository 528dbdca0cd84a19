# take: P.open(n)
# give: P.ack(n)
# gets: nothing
class Pool:
    def __init__(self, window):
        self.window = window
        self.in_flight = 0
        self.cond = threading.Condition()

    def open(self, n):
        with self.cond:
            while self.in_flight + n > self.window:
                self.cond.wait()
            self.in_flight += n

    def ack(self, n):
        with self.cond:
            self.in_flight -= n
            self.cond.notify()
