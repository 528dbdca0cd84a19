# take: P.claim_seed(key)
# give: P.drop_seed(X, key)
# gets: value
# type: SeedOffsets
from collections import defaultdict


class SeedOffsets:
    """Distinct RNG offsets within a named region (model-parallel, data, dropout)."""

    def __init__(self, base=2718):
        self.base = base
        self._taken = defaultdict(set)

    def _lowest(self, region):
        offset = 0
        while offset in self._taken[region]:
            offset += 1
        return offset

    def claim_seed(self, region):
        offset = self._lowest(region)
        self._taken[region].add(offset)
        return self.base + offset

    def drop_seed(self, seed, region):
        offset = seed - self.base
        if offset not in self._taken[region]:
            raise KeyError(f"seed {seed} is not claimed in {region}")
        self._taken[region].discard(offset)
