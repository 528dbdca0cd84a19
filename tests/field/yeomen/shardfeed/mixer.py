import logging
import random
from typing import Dict, Iterator, List, Optional

import numpy as np

from .leases import Coordinator
from .readers import CorruptShard, ScratchBuffers, ShardReader

log = logging.getLogger(__name__)


class StateMismatch(Exception):
    pass


class Source:
    """All the shards of one data set, one open at a time."""

    def __init__(self, name: str, shards: List[str], coordinator: Coordinator, buffers: ScratchBuffers):
        self.name = name
        self.shards = list(shards)
        self.coordinator = coordinator
        self.buffers = buffers
        self.reader: Optional[ShardReader] = None
        self._samples: Optional[Iterator[np.ndarray]] = None

    def _open_next(self) -> bool:
        while self.shards:
            shard = self.shards.pop()
            lease = self.coordinator.claim(shard)  # leak: goes with the reader of a corrupt shard, which is not closed
            if lease is None:
                continue
            reader = ShardReader(shard, lease, self.coordinator, self.buffers)  # leak: a shard that check() finds corrupt is passed over and not closed
            try:
                reader.check()
            except CorruptShard as exc:
                log.error("skipping %s", exc)
                continue
            self.reader = reader
            return True
        return False

    def next(self, length: int) -> Optional[np.ndarray]:
        while True:
            if self.reader is None:
                if not self._open_next():
                    return None
                self._samples = self.reader.samples(length)
            try:
                return next(self._samples)
            except StopIteration:
                self.reader.close(finished=True)
            except CorruptShard as exc:
                log.error("giving up on %s", exc)
                self.reader.close()
            self.reader = None

    def resume(self, shard: str, frame: int) -> None:
        lease = self.coordinator.claim(shard)  # clean: near miss, moves into the reader, which is closed when it does not fit
        if lease is None:
            raise StateMismatch(f"{shard} is taken")
        reader = ShardReader(shard, lease, self.coordinator, self.buffers)  # clean: closed here or by close() of the source
        try:
            fits = reader.seek_frame(frame)
        except CorruptShard:
            fits = False
        if not fits:
            reader.close()
            raise StateMismatch(f"{shard} has no frame {frame}")
        self.close()
        self.reader = reader
        self._samples = reader.samples(2048)

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()
            self.reader = None


class Mixer:
    def __init__(self, weights: Dict[str, float], seed: int = 0):
        self.weights = weights
        self.random = random.Random(seed)
        self.sources: Dict[str, Source] = {}

    def add(self, source: Source) -> None:
        old = self.sources.get(source.name)
        if old is not None:
            old.close()
        self.sources[source.name] = source

    def __iter__(self) -> Iterator[np.ndarray]:
        while self.sources:
            names = list(self.sources)
            (name,) = self.random.choices(names, [self.weights[n] for n in names])
            sample = self.sources[name].next(2048)
            if sample is None:
                self.sources.pop(name).close()
                continue
            yield sample

    def close(self) -> None:
        while self.sources:
            self.sources.popitem()[1].close()
