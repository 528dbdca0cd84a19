import time
from dataclasses import dataclass
from typing import Dict, Optional


class EncoderBudget:
    def __init__(self, rows):
        self.rows = rows
        self.granted = {}

    def grant(self, key, rows):
        if rows > self.rows:
            return None
        self.rows -= rows
        self.granted[key] = self.granted.get(key, 0) + rows
        return key, rows

    def ungrant(self, grant):
        key, rows = grant
        self.rows += rows
        self.granted[key] -= rows


@dataclass
class ImageInput:
    digest: str
    rows: int
    grant: Optional[tuple] = None
    seen: float = 0.0


class EncoderCache:
    def __init__(self, budget, lifetime):
        self.budget = budget
        self.lifetime = lifetime
        self.inputs: Dict[str, ImageInput] = {}
        self.warmup = budget.grant("warmup", 1)  # clean: close ungrants it

    def encode(self, item, encoder):
        known = self.inputs.get(item.digest)
        if known is not None:
            known.seen = time.monotonic()
            return known.grant[0]
        grant = self.budget.grant(item.digest, item.rows)  # leak: expire drops old inputs with their grant
        if grant is None:
            return None
        item.grant = grant
        item.seen = time.monotonic()
        self.inputs[item.digest] = item
        encoder(item.digest, item.rows)
        return grant[0]

    def expire(self):
        horizon = time.monotonic() - self.lifetime
        self.inputs = {d: i for d, i in self.inputs.items() if i.seen >= horizon}
        return len(self.inputs)

    def free(self, digest):
        item = self.inputs.pop(digest, None)
        if item is not None:
            self.budget.ungrant(item.grant)
            item.grant = None

    def estimate(self, rows):
        grant = self.budget.grant("estimate", rows)  # clean: ungranted at once
        fits = grant is not None
        if fits:
            self.budget.ungrant(grant)
        return fits

    def close(self):
        for digest in list(self.inputs):
            self.free(digest)
        if self.warmup is not None:
            self.budget.ungrant(self.warmup)
            self.warmup = None


def encode_video(budget, name, frames, encoder):
    grants = []
    for number, rows in enumerate(frames):
        grant = budget.grant("%s/%d" % (name, number), rows)  # leak: given up midway, earlier ones stay
        if grant is None:
            return False
        encoder(grant[0], rows)
        grants.append(grant)
    for grant in grants:
        budget.ungrant(grant)
    return True
