import io
import json
import logging
import os
import random
from contextlib import ExitStack, contextmanager
from typing import Any, Dict, Iterator, List, Optional

import numpy as np
import torch
from torch.utils.data import IterableDataset

LOG = logging.getLogger(__name__)
MAGIC = b"SHRD"


class ShardDataset(IterableDataset):
    """Tokens from binary shards with a small json index beside each."""

    def __init__(self, root: str, seq_len: int, shuffle: bool = True, seed: int = 0) -> None:
        self.root = root
        self.seq_len = seq_len
        self.shuffle = shuffle
        self.rng = random.Random(seed)
        self._bad: Dict[str, int] = {}

    def shards(self) -> List[str]:
        names = sorted(n for n in os.listdir(self.root) if n.endswith(".bin"))
        if self.shuffle:
            self.rng.shuffle(names)
        return [os.path.join(self.root, n) for n in names]

    def _open_checked(self, path: str) -> Optional[io.BufferedReader]:
        f = open(path, "rb")  # leak: a wrong magic returns None with the file open
        if f.read(4) != MAGIC:
            self._bad[path] = self._bad.get(path, 0) + 1
            return None
        return f

    def index(self, path: str) -> Dict[str, Any]:
        with open(path + ".json") as f:  # clean: with block
            return json.load(f)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for path in self.shards():
            f = self._open_checked(path)  # clean: near miss, closed after the inner loop, None is skipped
            if f is None:
                continue
            try:
                while True:
                    raw = f.read(self.seq_len * 2)
                    if len(raw) < self.seq_len * 2:
                        break
                    yield torch.from_numpy(np.frombuffer(raw, dtype=np.uint16).astype(np.int64))
            finally:
                f.close()

    def sample(self, n: int) -> List[torch.Tensor]:
        out: List[torch.Tensor] = []
        for path in self.shards():
            f = self._open_checked(path)  # leak: the return in the loop leaves this shard open
            if f is None:
                continue
            raw = f.read(self.seq_len * 2)
            out.append(torch.tensor(np.frombuffer(raw, dtype=np.uint16).astype(np.int64)))
            if len(out) == n:
                return out
            f.close()
        return out

    def total_tokens(self) -> int:
        total = 0
        for path in self.shards():
            fd = os.open(path, os.O_RDONLY)  # clean: os.close follows
            total += (os.fstat(fd).st_size - 4) // 2
            os.close(fd)
        return total


@contextmanager
def shard_writer(path: str):
    tmp = path + ".tmp"
    f = open(tmp, "wb")  # clean: closed in the finally of the context manager
    try:
        f.write(MAGIC)
        yield f
    finally:
        f.close()
    os.replace(tmp, path)


def merge(paths: List[str], target: str) -> int:
    written = 0
    with ExitStack() as stack:
        readers = [stack.enter_context(open(p, "rb")) for p in paths]  # clean: the exit stack closes all readers
        out = stack.enter_context(shard_writer(target))  # clean: closed by the stack
        for r in readers:
            if r.read(4) != MAGIC:
                LOG.warning("skipping a reader with a wrong header")
                continue
            data = r.read()
            out.write(data)
            written += len(data)
    return written


def vocabulary_size(path: str) -> int:
    return len(json.load(open(path)))  # leak: the file object is never closed


def verify(path: str, expected: int) -> None:
    f = open(path, "rb")  # leak: the raise on a size mismatch skips the close
    f.seek(0, os.SEEK_END)
    if f.tell() != expected:
        raise ValueError(f"{path}: {f.tell()} bytes instead of {expected}")
    f.close()


def head(path: str, n: int = 16) -> bytes:
    f = open(path, "rb")  # clean: near miss, the finally runs before the return value is delivered
    try:
        return f.read(n)
    finally:
        f.close()
