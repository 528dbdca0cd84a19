import threading


class Credits:
    """Counted permits: take(n) removes n, put(n) adds n."""

    def __init__(self, total):
        self._cv = threading.Condition()
        self._left = total

    def take(self, n):
        with self._cv:
            while self._left < n:
                self._cv.wait()
            self._left -= n
        return n

    def put(self, n):
        with self._cv:
            self._left += n
            self._cv.notify_all()


class Sender:
    def __init__(self, credits, wire):
        self.credits = credits
        self.wire = wire
        self.window = {}
        self.reserve = credits.take(1)  # clean: shutdown puts it back
        self.lock = threading.Lock()

    def send(self, seq, payload):
        with self.lock:
            if seq in self.window:
                return False
        amount = self.credits.take(len(payload))  # leak: selective ack deletes the entry without put
        with self.lock:
            self.window[seq] = (payload, amount)
        self.wire(seq, payload)
        return True

    def ack(self, upto):
        with self.lock:
            done = [s for s in self.window if s <= upto]
            for seq in done:
                _, amount = self.window.pop(seq)
                self.credits.put(amount)
        return len(done)

    def selective_ack(self, seqs):
        with self.lock:
            for seq in seqs:
                if seq in self.window:
                    del self.window[seq]
            return sorted(self.window)

    def urgent(self, payload):
        amount = self.credits.take(1)  # clean: put back after the wire call
        self.wire(-1, payload)
        self.credits.put(amount)

    def shutdown(self):
        with self.lock:
            for _, amount in self.window.values():
                self.credits.put(amount)
            self.window.clear()
        self.credits.put(self.reserve)


class Burst:
    def __init__(self, credits):
        self.credits = credits
        self.amounts = []

    def grow(self, n):
        self.amounts.append(self.credits.take(n))  # leak: release puts back the first amount only

    def level(self):
        return sum(self.amounts)

    def release(self):
        if not self.amounts:
            return 0
        first = self.amounts[0]
        self.credits.put(first)
        self.amounts = []
        return first
