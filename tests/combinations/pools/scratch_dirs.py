# take: P.make_dir(key)
# give: P.remove_dir(X)
# gets: value
# type: ScratchDirs
import pathlib
import shutil
import tempfile


class ScratchDirs:
    """Per-job compile-cache directories, bounded in number."""

    def __init__(self, limit=16):
        self.limit = limit
        self._live = set()

    def make_dir(self, tag):
        if len(self._live) >= self.limit:
            raise RuntimeError(f"{self.limit} scratch dirs open already")
        path = pathlib.Path(tempfile.mkdtemp(prefix=f"{tag}-"))
        self._live.add(path)
        return path

    def remove_dir(self, path):
        self._live.remove(path)
        shutil.rmtree(path, ignore_errors=True)
