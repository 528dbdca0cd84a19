"""Runs evaluations next to training on a few reserved accelerators.

The scheduler gives a request one or more accelerator slots, runs it in a thread
and calls back with scores.  A newer checkpoint supersedes an older one.
"""
import heapq
import itertools
import logging
import threading

logger = logging.getLogger("evals")


class Superseded(Exception):
    pass


class NotEnoughSlots(Exception):
    pass


class SlotTable(object):
    """Which request sits on which accelerator."""

    def __init__(self, device_ids):
        self.device_ids = list(device_ids)
        self._avail = set(device_ids)
        self._cv = threading.Condition()

    def seize(self, timeout=None):
        with self._cv:
            if not self._cv.wait_for(lambda: bool(self._avail), timeout):
                return None
            dev = self._avail.pop()  # clean: handed to the caller
            return dev

    def seize_group(self, n):
        if n > len(self.device_ids):
            raise NotEnoughSlots("%d of %d" % (n, len(self.device_ids)))
        with self._cv:
            self._cv.wait_for(lambda: len(self._avail) >= n)
            group = [self._avail.pop() for _ in range(n)]  # clean: handed to the caller
            return group

    def seize_healthy(self, check):
        with self._cv:
            tried = []
            found = None
            while self._avail:
                dev = self._avail.pop()  # clean: near miss, the unhealthy ones are put back and the healthy one is handed out
                if check(dev):
                    found = dev
                    break
                tried.append(dev)
            self._avail.update(tried)
            return found

    def restore(self, dev):
        with self._cv:
            self._avail.add(dev)
            self._cv.notify_all()

    def audit(self, memory_of):
        dirty = 0
        with self._cv:
            looked = set()
            while self._avail:
                dev = self._avail.pop()  # leak: a dirty device is counted and logged but not added to looked
                if memory_of(dev) > (1 << 28):
                    logger.warning("device %d is not empty", dev)
                    dirty += 1
                else:
                    looked.add(dev)
            self._avail = looked
            self._cv.notify_all()
        return dirty


class EvalRequest(object):
    _seq = itertools.count()

    def __init__(self, step, suite, fn, callback, slots=1, priority=0):
        self.step = step
        self.suite = suite
        self.fn = fn
        self.callback = callback
        self.nslots = slots
        self.key = (-priority, next(self._seq))
        self.cancelled = threading.Event()
        self.devices = []
        self.result = None

    def __lt__(self, other):
        return self.key < other.key

    def check(self):
        if self.cancelled.is_set():
            raise Superseded("%s at step %d" % (self.suite, self.step))


class EvalScheduler(object):
    def __init__(self, table, resolve):
        self.table = table
        self.resolve = resolve
        self._queue = []
        self._wake = threading.Condition()
        self._running = {}
        self._resident = {}
        self._halt = False
        self._main = threading.Thread(target=self._dispatch, name="evals", daemon=True)
        self._main.start()

    def submit(self, req):
        with self._wake:
            for old in self._queue:
                if old.suite == req.suite and old.step < req.step:
                    old.cancelled.set()
            heapq.heappush(self._queue, req)
            self._wake.notify()

    def _next(self):
        with self._wake:
            self._wake.wait_for(lambda: self._queue or self._halt)
            if self._halt:
                return None
            return heapq.heappop(self._queue)

    def _dispatch(self):
        while True:
            req = self._next()
            if req is None:
                return
            try:
                self._place(req)
            except (Superseded, NotEnoughSlots) as exc:
                logger.info("not run: %s", exc)
                req.callback(req, None)

    def _place(self, req):
        if req.nslots == 1:
            dev = self.table.seize()  # leak: check() raises Superseded before the device is in req.devices and _dispatch handles it
            req.check()
            req.devices = [dev]
        else:
            req.devices = self.table.seize_group(req.nslots)  # clean: near miss, the thread that is started restores all of devices
        self._running[(req.suite, req.step)] = req
        threading.Thread(target=self._run, args=(req,), daemon=True).start()

    def _run(self, req):
        try:
            req.check()
            path = self.resolve(req.step)
            req.result = req.fn(path, req.devices, req.check)
        except Superseded as exc:
            logger.info("stopped: %s", exc)
        except Exception:
            logger.exception("evaluation failed")
        finally:
            self._running.pop((req.suite, req.step), None)
            for dev in req.devices:
                self.table.restore(dev)
            req.devices = []
        req.callback(req, req.result)

    def make_resident(self, name, loader):
        if name in self._resident:
            return True
        dev = self.table.seize(timeout=1.0)  # leak: a loader that reports False leaves without restore
        if dev is None:
            return False
        if not loader(dev):
            logger.error("resident %s could not be loaded on %d", name, dev)
            return False
        self._resident[name] = dev
        return True

    def move_resident(self, name, check):
        """Go to a healthy device; the old one is given up when the move worked."""
        new = self.table.seize_healthy(check)  # clean: near miss, either new or old is restored and the other is in the table
        if new is None:
            return False
        old = self._resident.get(name)
        if old is None:
            self.table.restore(new)
            return False
        self._resident[name] = new
        self.table.restore(old)
        return True

    def swap_resident(self, name, loader):
        dev = self.table.seize(timeout=5.0)  # leak: the handler for RuntimeError restores only a device that is in the table of residents
        if dev is None:
            return False
        try:
            if not loader(dev):
                raise RuntimeError("loader of %s returned False" % name)
        except RuntimeError as exc:
            logger.error("swap: %s", exc)
            old = self._resident.pop(name, None)
            if old is not None:
                self.table.restore(old)
            return False
        old = self._resident.get(name)
        self._resident[name] = dev
        if old is not None:
            self.table.restore(old)
        return True

    def shutdown(self):
        with self._wake:
            self._halt = True
            self._wake.notify_all()
        self._main.join()
        for req in list(self._running.values()):
            req.cancelled.set()
        for dev in self._resident.values():
            self.table.restore(dev)
        self._resident.clear()


class Borrow(object):
    """A device for the time of a with block, with a watchdog."""

    def __init__(self, table, limit=600.0):
        self.table = table
        self.limit = limit
        self.dev = None
        self._timer = None
        self._mu = threading.Lock()

    def __enter__(self):
        self.dev = self.table.seize()  # clean: near miss, the watchdog or __exit__ restores it, whoever is first
        self._timer = threading.Timer(self.limit, self._give)
        self._timer.start()
        return self.dev

    def _give(self):
        with self._mu:
            dev, self.dev = self.dev, None
        if dev is not None:
            self.table.restore(dev)

    def __exit__(self, *exc):
        self._timer.cancel()
        self._give()
        return False


def compare(table, fn, a, b):
    left = table.seize(timeout=10.0)  # leak: without a second device in time the function returns and keeps the first
    right = table.seize(timeout=10.0)  # clean: restored in finally, or restored as the only one
    if left is None or right is None:
        if right is not None:
            table.restore(right)
        return None
    try:
        return fn(a, left), fn(b, right)
    finally:
        table.restore(left)
        table.restore(right)
