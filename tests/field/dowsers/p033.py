"""Scratch directories on NVMe for optimizer offload."""
import shutil
import tempfile
from pathlib import Path


class ScratchDirs:
    def __init__(self, root, limit):
        self.root = Path(root)
        self.limit = limit
        self.live = []

    def make_scratch(self, tag):
        if len(self.live) == self.limit:
            return None
        path = Path(tempfile.mkdtemp(prefix=tag, dir=self.root))
        self.live.append(path)
        return path

    def remove_scratch(self, path):
        self.live.remove(path)
        shutil.rmtree(path, ignore_errors=True)


class OptimizerOffload:
    def __init__(self, dirs: ScratchDirs):
        self.dirs = dirs
        self.home = None

    def start(self):
        self.home = self.dirs.make_scratch("adam")  # clean: shutdown() removes it
        return self.home is not None

    def shutdown(self):
        if self.home is not None:
            self.dirs.remove_scratch(self.home)
            self.home = None

    def spill_test(self, tensor):
        path = self.dirs.make_scratch("probe")  # clean: removed in finally
        if path is None:
            return False
        try:
            tensor.tofile(path / "t.bin")
            return (path / "t.bin").stat().st_size == tensor.nbytes
        finally:
            self.dirs.remove_scratch(path)

    def reshard(self, shards, world):
        path = self.dirs.make_scratch("reshard")  # leak: an even split has nothing to do and returns
        if path is None:
            return []
        if len(shards) % world == 0:
            return shards
        out = [s.rewrite(path, world) for s in shards]
        self.dirs.remove_scratch(path)
        return out

    def bandwidth(self, sizes, bench):
        rates = []
        for size in sizes:
            path = self.dirs.make_scratch("bw")  # leak: only removed when the rate is valid
            if path is None:
                break
            rate = bench(path, size)
            if rate > 0:
                rates.append(rate)
                self.dirs.remove_scratch(path)
        return rates
