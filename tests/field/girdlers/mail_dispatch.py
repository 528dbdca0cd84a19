"""Outgoing mail: SMTP channels from a pool, delivery threads, retry handling and a per-domain throttle."""
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass, field
from typing import List

log = logging.getLogger("mail")


class Refused(Exception):
    """The relay said no to one recipient; the channel stays usable."""


class Dropped(Exception):
    """The relay hung up; the channel must be scrapped."""


@dataclass
class Mail:
    sender: str
    rcpt: str
    text: str
    tries: int = 0
    notes: List[str] = field(default_factory=list)

    @property
    def domain(self):
        return self.rcpt.rpartition("@")[2]


class Channel:
    def __init__(self, relay, number):
        self.relay = relay
        self.number = number
        self.alive = True

    def deliver(self, mail):
        code = self._talk(mail)
        if code == 421:
            self.alive = False
            raise Dropped(self.relay)
        if code >= 500:
            raise Refused(f"{mail.rcpt}: {code}")
        return code

    def _talk(self, mail):
        log.debug("%s <- %s", self.relay, mail.rcpt)
        return 250 if "@" in mail.rcpt else 550


class ChannelPool:
    """get() waits for a channel, put() gives it back, scrap() gives a dead one back for a new one."""

    def __init__(self, relay, size):
        self.relay = relay
        self._stack = [Channel(relay, n) for n in range(size)]
        self._serial = size
        self._cond = threading.Condition()

    def get(self):
        with self._cond:
            while not self._stack:
                self._cond.wait()
            return self._stack.pop()

    def put(self, channel):
        with self._cond:
            self._stack.append(channel)
            self._cond.notify()

    def scrap(self, channel):
        log.info("channel %d scrapped", channel.number)
        with self._cond:
            self._serial += 1
            self._stack.append(Channel(self.relay, self._serial))
            self._cond.notify()


class Throttle:
    """Number of deliveries per domain at one time. enter() says whether there was room."""

    def __init__(self, most):
        self.most = most
        self._now = defaultdict(int)

    def enter(self, domain):
        if self._now[domain] >= self.most:
            return False
        self._now[domain] += 1
        return True

    def leave(self, domain):
        self._now[domain] -= 1


class Delivery(ABC):
    def __init__(self, pool, throttle):
        self.pool = pool
        self.throttle = throttle
        self.later = []

    @abstractmethod
    def send(self, mail):
        """True when the mail is settled, False when it should come again."""


class PlainDelivery(Delivery):
    def send(self, mail):
        if not self.throttle.enter(mail.domain):  # clean: left in finally
            self.later.append(mail)
            return False
        channel = self.pool.get()  # clean: near miss, put or scrapped on every branch
        try:
            channel.deliver(mail)
        except Refused as why:
            mail.notes.append(str(why))
            self.pool.put(channel)
        except Dropped:
            self.pool.scrap(channel)
            return False
        else:
            self.pool.put(channel)
        finally:
            self.throttle.leave(mail.domain)
        return True


class PatientDelivery(Delivery):
    """Tries again at once, a few times, when the relay hangs up."""

    tries = 3

    def send(self, mail):
        for n in range(self.tries):
            channel = self.pool.get()  # leak: after Dropped the next try takes another
            try:
                channel.deliver(mail)
            except Dropped:
                mail.tries += 1
                time.sleep(0.1 * n)
                continue
            except Refused as why:
                mail.notes.append(str(why))
            self.pool.put(channel)
            return True
        return False


class BulkDelivery(Delivery):
    """Many mails over one channel; the channel is exchanged when the relay hangs up."""

    def send_all(self, mails):
        channel = self.pool.get()  # clean: near miss, scrapped before it is exchanged, put at the end
        sent = 0
        for mail in mails:
            try:
                channel.deliver(mail)
                sent += 1
            except Refused as why:
                mail.notes.append(str(why))
            except Dropped:
                self.pool.scrap(channel)
                channel = self.pool.get()  # clean: scrapped in a later round or put at the end
                self.later.append(mail)
        self.pool.put(channel)
        return sent

    def send(self, mail):
        return self.send_all([mail]) == 1


class ThrottledBulk(BulkDelivery):
    def send_all(self, mails):
        sent = 0
        for mail in mails:
            if not self.throttle.enter(mail.domain):  # leak: mails without a text go on without leave
                self.later.append(mail)
                continue
            if not mail.text.strip():
                mail.notes.append("empty")
                continue
            sent += super().send_all([mail])
            self.throttle.leave(mail.domain)
        return sent


class Router:
    """Chooses between two relays. A reply channel is kept between open_reply and close_reply."""

    def __init__(self, inland: ChannelPool, abroad: ChannelPool):
        self.inland = inland
        self.abroad = abroad
        self.reply = None
        self.reply_pool = None

    def pick(self, mail):
        return self.inland if mail.domain.endswith(".example") else self.abroad

    def forward(self, mail, copy_to):
        """The mail and a copy of it, each over the relay of its domain."""
        copy = Mail(mail.sender, copy_to, mail.text)
        first = self.pick(mail).get()  # clean: put back into the pool of its own mail
        second = self.pick(copy).get()  # leak: first is put back a second time in its place
        codes = []
        for channel, item in ((first, mail), (second, copy)):
            try:
                codes.append(channel.deliver(item))
            except (Refused, Dropped) as why:
                item.notes.append(repr(why))
        self.pick(mail).put(first)
        self.pick(copy).put(first)
        return codes

    def open_reply(self, mail):
        self.close_reply()
        pool = self.pick(mail)
        self.reply = pool.get()  # clean: near miss, close_reply puts it into the pool noted here
        self.reply_pool = pool

    def close_reply(self):
        if self.reply is not None:
            self.reply_pool.put(self.reply)
        self.reply = self.reply_pool = None


class DeliveryThread(threading.Thread):
    """Delivers what on_next gives it until there is nothing more."""

    def __init__(self, pool, on_next, on_end):
        super().__init__(daemon=True)
        self.channel = pool.get()  # clean: near miss, handed to on_end when the thread is through
        self.on_next = on_next
        self.on_end = on_end
        self.count = 0

    def run(self):
        while True:
            mail = self.on_next()
            if mail is None:
                break
            try:
                self.channel.deliver(mail)
                self.count += 1
            except (Refused, Dropped) as why:
                mail.notes.append(repr(why))
        self.on_end(self.channel)


def deliver_parallel(pool, mails, width):
    todo = list(mails)
    mutex = threading.Lock()

    def take():
        with mutex:
            return todo.pop() if todo else None

    def ended(channel):
        (pool.put if channel.alive else pool.scrap)(channel)

    threads = [DeliveryThread(pool, take, ended) for _ in range(width)]  # clean: ended puts or scraps each
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(thread.count for thread in threads)


def deliver_counted(pool, mails):
    todo = list(mails)
    counts = []

    def ended(channel):
        counts.append((channel.number, time.time()))

    def take():
        return todo.pop() if todo else None

    thread = DeliveryThread(pool, take, ended)  # leak: ended only notes the number
    thread.start()
    thread.join()
    return counts
