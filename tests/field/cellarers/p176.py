"""Mail relay: sessions have a limited number of uses, and are put in quarantine after a refusal."""
import smtplib
import time


class RelaySessions:
    def __init__(self, host, max_uses=50, penalty=60.0):
        self.host = host
        self.max_uses = max_uses
        self.penalty = penalty
        self.rested = []
        self.uses = {}
        self.quarantined = []

    def summon(self):
        now = time.monotonic()
        for until, s in [q for q in self.quarantined if q[0] <= now]:
            self.quarantined.remove((until, s))
            self.rested.append(s)
        s = self.rested.pop() if self.rested else smtplib.SMTP(self.host)
        self.uses[s] = self.uses.get(s, 0) + 1
        return s

    def rest(self, s):
        if self.uses[s] >= self.max_uses:
            self.bury(s)
        else:
            self.rested.append(s)

    def punish(self, s):
        self.quarantined.append((time.monotonic() + self.penalty, s))

    def bury(self, s):
        del self.uses[s]
        s.quit()


def deliver(relay, mail):
    s = relay.summon()  # clean: rested, punished or buried
    try:
        refused = s.sendmail(mail.sender, mail.rcpts, mail.text)
    except smtplib.SMTPServerDisconnected:
        relay.bury(s)
        return False
    if refused:
        relay.punish(s)
        return False
    relay.rest(s)
    return True


def verify(relay, address):
    s = relay.summon()  # leak: a refused address ends neither in rest nor in quarantine
    code, _ = s.verify(address)
    if code == 250:
        relay.rest(s)
        return True
    return False


def expand_lists(relay, names):
    found = {}
    for name in names:
        s = relay.summon()  # leak: names without an answer continue with the session
        code, text = s.expn(name)
        if code != 250:
            continue
        found[name] = text
        relay.rest(s)
    return found
