"""Memory tiers that hold KV blocks: device, host, disk."""
import logging
import threading

logger = logging.getLogger(__name__)


class TierFull(Exception):
    def __init__(self, tier):
        super().__init__(tier.name)
        self.tier = tier


class Tier:
    def __init__(self, name, blocks):
        self.name = name
        self.blocks = blocks
        self._mu = threading.Lock()
        self._free = list(range(blocks))

    def get(self):
        with self._mu:
            if not self._free:
                raise TierFull(self)
            return self._free.pop()  # clean: caller's

    def get_batch(self, n):
        """n blocks, or TierFull and none."""
        got = []
        try:
            for _ in range(n):
                got.append(self.get())  # clean: near miss, put back by the except when the tier ends half way
        except TierFull:
            for block in got:
                self.put(block)
            raise
        return got

    def put(self, block):
        with self._mu:
            self._free.append(block)

    def put_batch(self, blocks):
        for block in blocks:
            self.put(block)

    def get_near(self, hint, reach=16):
        """A block close to hint, for sequential disk reads, else any."""
        with self._mu:
            spare = []
            while self._free:
                block = self._free.pop()  # leak: far blocks wait in spare and are put back only when no near one is found
                if abs(block - hint) <= reach:
                    return block
                spare.append(block)
            self._free = spare
        return self.get()  # clean: caller's

    @property
    def used(self):
        return self.blocks - len(self._free)
