"""CPU cores for tokenizer workers, borrowed as frozensets."""
import os


class CoreSet:
    def __init__(self, cores=None):
        self._cores = set(cores if cores is not None else os.sched_getaffinity(0))

    def __len__(self):
        return len(self._cores)

    def carve(self, n):
        if n > len(self._cores):
            return frozenset()
        part = frozenset(sorted(self._cores)[:n])
        self._cores -= part
        return part

    def merge(self, part):
        self._cores |= part


class WorkerFarm:
    def __init__(self, cores: CoreSet, spawn):
        self.cores = cores
        self.spawn = spawn
        self.workers = {}

    def add(self, name, n):
        part = self.cores.carve(n)  # clean: stored with the worker, kill() merges it
        if not part:
            return False
        self.workers[name] = (self.spawn(name, part), part)
        return True

    def kill(self, name):
        proc, part = self.workers.pop(name)
        proc.terminate()
        self.cores.merge(part)

    def run_once(self, fn, n):
        part = self.cores.carve(n)  # clean: merged in finally
        try:
            return fn(part)
        finally:
            self.cores.merge(part)

    def try_add(self, name, n, node):
        part = self.cores.carve(n)  # leak: cores of another node are not merged again
        if not part:
            return False
        if any(c // 64 != node for c in part):
            return False
        self.workers[name] = (self.spawn(name, part), part)
        return True

    def calibrate(self, fn):
        best = 1
        for n in (1, 2, 4, 8):
            part = self.cores.carve(n)  # leak: break when it no longer scales
            if not part:
                return best
            if fn(part) < best * 1.1:
                break
            best = n
            self.cores.merge(part)
        return best
