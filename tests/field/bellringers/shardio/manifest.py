"""Which tensor lies in which shard."""
import json
import os
import tempfile
from typing import Dict, NamedTuple, Tuple


class Entry(NamedTuple):
    shard: str
    offset: int
    nbytes: int
    dtype: str
    shape: Tuple[int, ...]


class Manifest:
    NAME = "manifest.json"

    def __init__(self, entries: Dict[str, Entry]) -> None:
        self.entries = entries

    @classmethod
    def load(cls, root: str) -> "Manifest":
        with open(os.path.join(root, cls.NAME)) as f:  # clean: closed by with
            raw = json.load(f)
        return cls({k: Entry(v[0], v[1], v[2], v[3], tuple(v[4])) for k, v in raw.items()})

    def save(self, root: str, overwrite: bool = False) -> bool:
        fd, tmp = tempfile.mkstemp(dir=root)  # leak: the descriptor is not closed when a manifest is there already
        target = os.path.join(root, self.NAME)
        if os.path.exists(target) and not overwrite:
            os.unlink(tmp)
            return False
        with os.fdopen(fd, "w") as f:  # clean: closed by with, and the descriptor with it
            json.dump({k: list(v) for k, v in self.entries.items()}, f)
        os.replace(tmp, target)
        return True

    def shards(self):
        return sorted({e.shard for e in self.entries.values()})
