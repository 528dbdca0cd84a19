"""Channels, calls in flight, probes and buffers of the parameter server's wire."""
from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections import defaultdict, deque


class WireError(Exception):
    pass


class Channel:
    def __init__(self, host):
        self.host = host
        self.opened_at = time.monotonic()

    def send(self, blob):
        return len(blob)

    def recv(self):
        return b""

    def shut(self):
        self.host = None


class ChannelExchange:
    """Idle channels a host; old ones are shut when hung up."""

    def __init__(self, max_age=300.0, per_host=2):
        self._idle = defaultdict(deque)
        self._max_age = max_age
        self._per_host = per_host
        self._live = defaultdict(int)

    def dial(self, host):
        if self._idle[host]:
            return self._idle[host].pop()
        if self._live[host] >= self._per_host:
            raise WireError(f"{host}: all lines are busy")
        self._live[host] += 1
        return Channel(host)

    def hang_up(self, host, channel):
        if time.monotonic() - channel.opened_at > self._max_age:
            channel.shut()
            self._live[host] -= 1
        else:
            self._idle[host].append(channel)


def ask(exchange, host, blob):
    ch = exchange.dial(host)  # leak: an empty answer is returned before hang_up
    ch.send(blob)
    answer = ch.recv()
    if not answer:
        return None
    exchange.hang_up(host, ch)
    return answer


def ask_any(exchange, hosts, blob):
    for host in random.sample(hosts, len(hosts)):
        try:
            ch = exchange.dial(host)  # clean: hung up on every way round the loop
        except WireError:
            continue
        answer = None
        if ch.send(blob) == len(blob):
            answer = ch.recv()
        exchange.hang_up(host, ch)
        if answer:
            return answer
    return None


def broadcast(exchange, hosts, blob):
    lines = {}
    for host in hosts:
        lines[host] = exchange.dial(host)  # leak: a host that takes less than the blob is skipped in the last loop
    acks = 0
    for host, ch in lines.items():
        if ch.send(blob) < len(blob):
            continue
        acks += 1
        exchange.hang_up(host, ch)
    return acks


class CallTable:
    """Correlation numbers for calls that wait for an answer."""

    def __init__(self):
        self._calls = {}
        self._ids = itertools.count(1)

    def register(self, fut):
        cid = next(self._ids)
        self._calls[cid] = fut
        return cid

    def resolve(self, cid, value):
        fut = self._calls.pop(cid, None)
        if fut is not None and not fut.done():
            fut.set_result(value)

    def forget(self, cid):
        self._calls.pop(cid, None)

    def __len__(self):
        return len(self._calls)


async def call(table, channel, blob, timeout):
    fut = asyncio.get_running_loop().create_future()
    cid = table.register(fut)  # leak: a timeout is caught, the number is not forgotten
    channel.send(cid.to_bytes(8, "little") + blob)
    try:
        return await asyncio.wait_for(fut, timeout)
    except asyncio.TimeoutError:
        return None


async def call_once(table, channel, blob, timeout):
    fut = asyncio.get_running_loop().create_future()
    cid = table.register(fut)  # clean: forgotten in finally, resolved or not
    try:
        channel.send(cid.to_bytes(8, "little") + blob)
        return await asyncio.wait_for(fut, timeout)
    except asyncio.TimeoutError:
        return None
    finally:
        table.forget(cid)


class Window:
    """Flow control: at most `size` messages without acknowledgement."""

    def __init__(self, size):
        self.size = size
        self._out = 0
        self._cond = threading.Condition()

    def admit(self, timeout=None):
        with self._cond:
            if not self._cond.wait_for(lambda: self._out < self.size, timeout):
                return False
            self._out += 1
            return True

    def depart(self, k=1):
        with self._cond:
            self._out -= k
            self._cond.notify(k)


def stream_out(window, channel, messages):
    sent = 0
    for msg in messages:
        if not window.admit(timeout=2.0):  # leak: a short send breaks without depart
            break
        if channel.send(msg) != len(msg):
            break
        sent += 1
        window.depart()
    return sent


class AckedSender:
    def __init__(self, window, channel):
        self.window = window
        self.channel = channel
        self.unacked = deque()

    def send(self, seq, msg):
        self.window.admit()  # clean: near miss, on_ack departs what it takes off unacked
        self.unacked.append(seq)
        self.channel.send(msg)

    def on_ack(self, upto):
        k = 0
        while self.unacked and self.unacked[0] <= upto:
            self.unacked.popleft()
            k += 1
        if k:
            self.window.depart(k)

    def on_disconnect(self):
        self.window.depart(len(self.unacked))
        self.unacked.clear()


class ResettingSender:
    def __init__(self, window, channel):
        self.window = window
        self.channel = channel
        self.unacked = set()

    def send(self, seq, msg):
        self.window.admit()  # leak: a disconnect forgets the unacked numbers without depart
        self.unacked.add(seq)
        self.channel.send(msg)

    def on_ack(self, seq):
        if seq in self.unacked:
            self.unacked.remove(seq)
            self.window.depart()

    def on_disconnect(self, channel):
        self.unacked = set()
        self.channel = channel


class Probe:
    __slots__ = ("_breaker", "_settled")

    def __init__(self, breaker):
        self._breaker = breaker
        self._settled = False

    def succeed(self):
        self._settle(ok=True)

    def fail(self):
        self._settle(ok=False)

    def _settle(self, ok):
        if self._settled:
            return
        self._settled = True
        self._breaker._on_probe(ok)


class Breaker:
    """Half open, it hands out few probes; each must succeed or fail."""

    def __init__(self, max_probes=1):
        self.state = "closed"
        self._probes = 0
        self._max = max_probes

    def try_probe(self):
        if self.state == "open" or self._probes >= self._max:
            return None
        self._probes += 1
        return Probe(self)

    def _on_probe(self, ok):
        self._probes -= 1
        self.state = "closed" if ok else "open"


def guarded(breaker, fn, arg):
    probe = breaker.try_probe()  # clean: settled with succeed or fail
    if probe is None:
        raise WireError("breaker is open")
    try:
        out = fn(arg)
    except WireError:
        probe.fail()
        return None
    probe.succeed()
    return out


def guarded_fetch(breaker, cache, fn, key):
    probe = breaker.try_probe()  # leak: a hit in the cache returns with the probe unsettled
    if probe is None:
        return cache.get(key)
    if key in cache:
        return cache[key]
    try:
        cache[key] = fn(key)
    except WireError:
        probe.fail()
        return None
    probe.succeed()
    return cache[key]


class BufferRental:
    SIZES = (1 << 10, 1 << 14, 1 << 18)

    def __init__(self):
        self._racks = {s: [] for s in self.SIZES}
        self.rented = 0

    def rent(self, n):
        for s in self.SIZES:
            if n <= s:
                self.rented += 1
                return self._racks[s].pop() if self._racks[s] else bytearray(s)
        raise WireError(f"{n} bytes is too much")

    def rent_many(self, *ns):
        return [self.rent(n) for n in ns]

    def surrender(self, *bufs):
        for b in bufs:
            self._racks[len(b)].append(b)
            self.rented -= 1


def frame_message(rental, head, body):
    a, b = rental.rent_many(len(head), len(body))  # clean: both surrendered
    a[: len(head)] = head
    b[: len(body)] = body
    out = bytes(a[: len(head)]) + bytes(b[: len(body)])
    rental.surrender(a, b)
    return out


def frame_vector(rental, parts):
    bufs = rental.rent_many(*map(len, parts))  # leak: only the buffers of non-empty parts are surrendered
    for buf, part in zip(bufs, parts):
        buf[: len(part)] = part
    out = b"".join(bytes(b[: len(p)]) for b, p in zip(bufs, parts))
    rental.surrender(*(b for b, p in zip(bufs, parts) if p))
    return out


def read_message(rental, channel, n):
    buf = rental.rent(n)  # clean: surrendered on the retry before it is rented anew
    while channel.recv_into(buf) == 0 and n < 1 << 18:
        rental.surrender(buf)
        n *= 2
        buf = rental.rent(n)  # clean: near miss, surrendered by the next turn or after the loop
    data = bytes(buf)
    rental.surrender(buf)
    return data


class HeaderParser:
    """Takes headers out of text."""

    def __init__(self, text):
        self._lines = text.splitlines()
        self._at = 0

    def take(self):
        if self._at >= len(self._lines):
            return None
        line = self._lines[self._at]
        self._at += 1
        return line

    def untake(self):
        self._at -= 1


def content_length(text):
    parser = HeaderParser(text)
    while True:
        line = parser.take()  # clean: a parser's line is read, not lent
        if line is None:
            return 0
        if line.lower().startswith("content-length:"):
            return int(line.split(":")[1])
