"""Exclusive cores for latency-critical threads, held as a mask."""
import os


class CoreSet:
    def __init__(self, cores):
        self.spare = 0
        for c in cores:
            self.spare |= 1 << c

    def isolate(self, n):
        if self.spare.bit_count() < n:
            return 0
        mask = 0
        while mask.bit_count() < n:
            mask |= (self.spare ^ mask) & -(self.spare ^ mask)
        self.spare ^= mask
        return mask

    def share(self, mask):
        self.spare |= mask


def cores_of(mask):
    return {i for i in range(mask.bit_length()) if mask >> i & 1}


class Poller:
    def __init__(self, cores):
        self.cores = cores
        self.mask = 0

    def start(self, n):
        self.mask = self.cores.isolate(n)  # clean: kept as mask, shared again by stop()
        if self.mask:
            os.sched_setaffinity(0, cores_of(self.mask))

    def stop(self):
        self.cores.share(self.mask)
        self.mask = 0


def benchmark(cores, fn, repeat):
    mask = cores.isolate(1)  # clean: shared in finally
    if not mask:
        return None
    try:
        os.sched_setaffinity(0, cores_of(mask))
        return [fn() for _ in range(repeat)]
    finally:
        cores.share(mask)


def run_isolated(cores, fns):
    mask = cores.isolate(len(fns))  # leak: the first function that fails returns with the cores isolated
    if mask == 0:
        return False
    for core, fn in zip(cores_of(mask), fns):
        os.sched_setaffinity(0, {core})
        if not fn():
            return False
    cores.share(mask)
    return True


def can_isolate(cores, n):
    return cores.isolate(n) != 0  # leak: the question itself takes the cores
