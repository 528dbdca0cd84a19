import time


class Breaker:
    CLOSED, OPEN, HALF_OPEN = "closed", "open", "half-open"

    def __init__(self, threshold=5, cooldown=10.0, probes=2):
        self.state = self.CLOSED
        self.threshold, self.cooldown, self.probes = threshold, cooldown, probes
        self.probing = self.failures = 0
        self.opened_at = 0.0

    def begin_probe(self):
        if self.state == self.OPEN and time.monotonic() - self.opened_at > self.cooldown:
            self.state = self.HALF_OPEN
        if self.state == self.OPEN or self.probing >= self.probes:
            return False
        self.probing += 1
        return True

    def end_probe(self, ok):
        self.probing -= 1
        if ok:
            self.state, self.failures = self.CLOSED, 0
            return
        self.failures += 1
        if self.failures >= self.threshold:
            self.state, self.opened_at = self.OPEN, time.monotonic()


class PaymentClient:
    def __init__(self, breaker, http):
        self.breaker = breaker
        self.http = http

    def charge(self, card, cents):
        if not self.breaker.begin_probe():  # clean: refused without a probe, ended otherwise
            return None
        status = self.http.post("/charge", card=card, cents=cents)
        self.breaker.end_probe(status < 500)
        return status

    def refund(self, charge_id):
        if not self.breaker.begin_probe():  # leak: a client error returns without ending the probe
            return None
        status = self.http.post("/refund", id=charge_id)
        if 400 <= status < 500:
            return status
        self.breaker.end_probe(status < 400)
        return status

    def status(self):
        ok = False
        if self.breaker.begin_probe():  # clean: ended in finally
            try:
                ok = self.http.get("/status") == 200
            finally:
                self.breaker.end_probe(ok)
        return ok

    def charges(self, pages):
        for page in range(pages):
            if not self.breaker.begin_probe():  # leak: an empty page breaks the loop inside the probe
                break
            rows = self.http.list("/charges", page)
            if not rows:
                break
            self.breaker.end_probe(True)
