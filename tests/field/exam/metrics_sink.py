"""Metric sinks used by the trainer. Writers are shared by name and counted."""

import atexit
import json
import logging
import threading
import time


class Writer(object):
    def __init__(self, path):
        self.path = path
        self.fh = open(path, "a")  # clean: shut() closes it
        self.n = 0

    def emit(self, rec):
        self.fh.write(json.dumps(rec) + "\n")
        self.n += 1

    def shut(self):
        self.fh.close()


class LazyWriter(object):
    """Opens on the first record."""

    def __init__(self, path):
        self.path = path
        self.fh = None

    def emit(self, rec):
        if self.fh is None:
            self.fh = open(self.path, "a")  # leak: shut() returns early when nothing is pending
        self.fh.write(json.dumps(rec) + "\n")
        self.pending = getattr(self, "pending", 0) + 1
        if self.pending >= 100:
            self.fh.flush()
            self.pending = 0

    def shut(self):
        if not getattr(self, "pending", 0):
            return
        self.fh.close()
        self.fh = None


class Hub(object):
    def __init__(self, root):
        self.root = root
        self.writers = {}
        self.counts = {}
        self.lock = threading.Lock()
        atexit.register(self.shut_all)

    def attach(self, name):
        with self.lock:  # clean: with statement
            if name not in self.writers:
                self.writers[name] = Writer("%s/%s.jsonl" % (self.root, name))  # clean: detach or shut_all shuts it
                self.counts[name] = 0
            self.counts[name] += 1
            return self.writers[name]

    def detach(self, w):
        with self.lock:  # clean: with statement
            for name, x in list(self.writers.items()):
                if x is w:
                    self.counts[name] -= 1
                    if self.counts[name] == 0:
                        del self.counts[name]
                        self.writers.pop(name).shut()

    def shut_all(self):
        for w in self.writers.values():
            w.shut()
        self.writers.clear()
        self.counts.clear()


def log_once(hub, name, **rec):
    w = hub.attach(name)  # clean: detached
    w.emit(rec)
    hub.detach(w)


def log_nonzero(hub, name, **rec):
    w = hub.attach(name)  # leak: a record of zeros returns before detach
    if not any(rec.values()):
        return False
    w.emit(rec)
    hub.detach(w)
    return True


def log_all(hub, recs):
    for name, rec in recs:
        w = hub.attach(name)  # clean: near miss, finally runs for the continue too
        try:
            if not rec:
                continue
            w.emit(rec)
        finally:
            hub.detach(w)


def log_all_fast(hub, recs):
    w = None
    last = None
    for name, rec in recs:
        if name != last:
            w = hub.attach(name)  # leak: a change of name overwrites w, only the last one is detached
            last = name
        w.emit(rec)
    if w is not None:
        hub.detach(w)


def log_all_grouped(hub, recs):
    w = None
    last = None
    for name, rec in recs:
        if name != last:
            if w is not None:
                hub.detach(w)
            w = hub.attach(name)  # clean: near miss, the former writer is detached first, the last one at the end
            last = name
        w.emit(rec)
    if w is not None:
        hub.detach(w)


class Timer(object):
    def __init__(self, hub, name):
        self.hub = hub
        self.w = hub.attach(name)  # clean: stop detaches it
        self.t0 = time.time()

    def stop(self):
        w, self.w = self.w, None
        if w is None:
            return
        w.emit({"sec": time.time() - self.t0})
        self.hub.detach(w)


class Sampler(object):
    def __init__(self, hub, name, every):
        self.hub = hub
        self.every = every
        self.i = 0
        self.w = hub.attach(name)  # leak: stop emits the count, sets the field to None and never detaches

    def tick(self, value):
        self.i += 1
        if self.i % self.every == 0:
            self.w.emit({"i": self.i, "v": value})

    def stop(self):
        if self.w is not None:
            self.w.emit({"total": self.i})
        self.w = None


def timed(hub, name, fn):
    t = Timer(hub, name)  # clean: stopped in finally
    try:
        return fn()
    finally:
        t.stop()


def timed_if(hub, name, fn, verbose):
    t = Timer(hub, name) if verbose else None  # leak: a None result returns before stop
    out = fn()
    if out is None:
        return None
    if verbose:
        t.stop()
    return out


def tee(hub, names, rec):
    ws = [hub.attach(n) for n in names]  # clean: near miss, all are detached although some are not written to
    for w in ws:
        if w.n < 1000:
            w.emit(rec)
    for w in ws:
        hub.detach(w)


def tee_some(hub, names, rec):
    ws = [hub.attach(n) for n in names]  # leak: writers over the limit are not detached
    for w in ws:
        if w.n >= 1000:
            logging.info("%s is full", w.path)
            continue
        w.emit(rec)
        hub.detach(w)


def copy_tail(src, dst, n):
    a = open(src)  # clean: closed right after the read
    lines = a.readlines()[-n:]
    a.close()
    b = open(dst, "w")  # leak: nothing to write means return with the file open
    if not lines:
        return 0
    b.writelines(lines)
    b.close()
    return len(lines)
