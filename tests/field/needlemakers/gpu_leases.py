"""Leases of whole GPUs and of fractions, for evaluation jobs of one node."""
import heapq
import logging
import threading
from dataclasses import dataclass, field

import torch

log = logging.getLogger("devices")


class NoDevice(Exception):
    pass


@dataclass(order=True)
class Device:
    load: int
    index: int
    total_gb: int = field(compare=False, default=80)
    used_gb: int = field(compare=False, default=0)

    @property
    def torch_device(self):
        return torch.device("cuda", self.index)


class DeviceYard:
    """Whole devices. `grab` is exclusive, the least loaded one first."""

    def __init__(self, n):
        self._heap = [Device(0, i) for i in range(n)]
        heapq.heapify(self._heap)
        self._mu = threading.Lock()

    def grab(self):
        with self._mu:
            if not self._heap:
                return None
            return heapq.heappop(self._heap)  # clean: returned to the caller

    def grab_with(self, min_free_gb):
        """Skips devices that other processes fill."""
        with self._mu:
            while self._heap:
                dev = heapq.heappop(self._heap)  # leak: a device below the minimum is popped and never pushed back
                if dev.total_gb - dev.used_gb >= min_free_gb:
                    return dev
        return None

    def surrender(self, dev, worked=0):
        with self._mu:
            dev.load += worked
            heapq.heappush(self._heap, dev)


class DeviceLease:
    """`with DeviceLease(yard) as dev`; keep() leaves the device to the caller."""

    def __init__(self, yard):
        self.yard = yard
        self.dev = None
        self.kept = False

    def __enter__(self):
        dev = self.yard.grab()  # clean: near miss, surrendered by __exit__ unless keep passed it on
        if dev is None:
            raise NoDevice()
        self.dev = dev
        return self

    def keep(self):
        self.kept = True
        return self.dev

    def __exit__(self, *exc):
        if not self.kept:
            self.yard.surrender(self.dev)
        self.dev = None
        return False


class ProfiledLease:
    def __init__(self, yard, profiler=None):
        self.yard = yard
        self.profiler = profiler

    def __enter__(self):
        self.dev = self.yard.grab()  # leak: __exit__ returns early when there is no profiler
        if self.dev is None:
            raise NoDevice()
        return self.dev

    def __exit__(self, et, ev, tb):
        if self.profiler is None:
            return False
        self.profiler.flush(self.dev.index)
        self.yard.surrender(self.dev)
        return False


class EvalRunner:
    def __init__(self, yard):
        self.yard = yard
        self.assigned = {}
        self.overrides = {}
        self.host_lock = threading.Lock()

    def run(self, model_fn, batches):
        dev = self.yard.grab()  # clean: finally
        if dev is None:
            raise NoDevice()
        n = 0
        try:
            model = model_fn().to(dev.torch_device)
            for b in batches:
                model(b.to(dev.torch_device))
                n += 1
        finally:
            self.yard.surrender(dev, worked=n)
        return n

    def run_pipeline(self, stages, batch):
        devs = []
        for _ in stages:
            dev = self.yard.grab()  # leak: devices of earlier stages are lost when one stage gets none
            if dev is None:
                log.warning("pipeline wants %d devices, got %d", len(stages), len(devs))
                return None
            devs.append(dev)
        x = batch
        for stage, dev in zip(stages, devs):
            x = stage.to(dev.torch_device)(x.to(dev.torch_device))
        for dev in devs:
            self.yard.surrender(dev, worked=1)
        return x

    def compare(self, left, right, batch):
        a = self.yard.grab()  # clean: surrendered by the rollback and at the end
        b = self.yard.grab()  # leak: the rollback gives back only the first when a is None and b is not
        if a is None or b is None:
            if a is not None:
                self.yard.surrender(a)
            return None
        try:
            da = left.to(a.torch_device)(batch.to(a.torch_device)).cpu()
            db = right.to(b.torch_device)(batch.to(b.torch_device)).cpu()
        finally:
            self.yard.surrender(a)
            self.yard.surrender(b)
        return (da - db).abs().max().item()

    def assign(self, tenant):
        if tenant in self.assigned:
            return self.assigned[tenant]
        with DeviceLease(self.yard) as lease:  # clean: near miss, keep() hands the device to self.assigned
            if lease.dev.total_gb < 40:
                return None
            self.assigned[tenant] = lease.keep()
        return self.assigned[tenant]

    def unassign(self, tenant):
        dev = self.assigned.pop(tenant, None)
        if dev is not None:
            self.yard.surrender(dev)

    def override(self, tenant):
        """Sends the tenant's next jobs to the currently least loaded device."""
        dev = self.yard.grab()  # leak: an earlier override of the tenant is overwritten in the table
        if dev is None:
            return self.overrides.get(tenant)
        self.overrides[tenant] = dev
        log.info("tenant %s now on %d", tenant, dev.index)
        return dev

    def warm(self, fns):
        self.host_lock.acquire()  # leak: return on a missing device keeps the lock
        dev = self.yard.grab()  # clean: surrendered after the loop
        if dev is None:
            return 0
        for fn in fns:
            fn(dev.torch_device)
        self.yard.surrender(dev)
        self.host_lock.release()
        return len(fns)

    def close(self):
        for tenant in list(self.assigned):
            self.unassign(tenant)
        while self.overrides:
            self.yard.surrender(self.overrides.popitem()[1])
