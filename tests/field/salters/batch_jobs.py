"""Offline batch API: input files are split into shards, workers claim shards and write results."""
from __future__ import annotations

import collections
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Deque, Dict, Iterator, List, Optional

MAX_CLAIMS = 64


@dataclass(eq=False)
class Claim:
    shard: str
    worker: str
    lines: int = 0


_claims: Dict[str, Claim] = {}
_seats: List[int] = list(range(16))


def claim_shard(shard: str, worker: str) -> Optional[Claim]:
    if shard in _claims:
        return None
    if len(_claims) >= MAX_CLAIMS:
        return None
    _claims[shard] = Claim(shard, worker)
    return _claims[shard]


def drop_claim(claim: Claim) -> None:
    if _claims.get(claim.shard) is claim:
        del _claims[claim.shard]


def sit() -> Optional[int]:
    """A seat in the engine's offline lane."""
    return _seats.pop() if _seats else None


def stand(seat: int) -> None:
    _seats.append(seat)


def rotate_seats(worn: Callable[[int], bool]) -> int:
    """Goes once round the idle seats; there are as many of them afterwards."""
    replaced = 0
    for _ in range(len(_seats)):
        seat = _seats.pop(0)  # leak: a worn seat is counted as replaced, but no seat comes in its place
        if worn(seat):
            replaced += 1
            continue
        _seats.append(seat)
    return replaced


def renumber_seats(base: int) -> int:
    for _ in range(len(_seats)):
        seat = _seats.pop(0)  # clean: near miss, appended again on either branch
        if seat < base:
            _seats.append(seat + base)
        else:
            _seats.append(seat)
    return len(_seats)


def read_requests(path: Path) -> Iterator[dict]:
    with open(path) as src:  # clean: closed by with
        for line in src:
            if line.strip():
                yield json.loads(line)


def count_lines(path: Path, limit: int) -> int:
    src = open(path)  # leak: at the limit the count is returned with the file open
    n = 0
    for line in src:
        if line.strip():
            n += 1
        if n == limit:
            return n
    src.close()
    return n


def seats(limit: int) -> Iterator[int]:
    """Seats one after the other; each is free again when the next one is asked for."""
    for _ in range(limit):
        seat = sit()  # leak: a consumer that breaks never comes back to stand(), see first_answer()
        if seat is None:
            return
        yield seat
        stand(seat)


def first_answer(prompts: List[str], ask: Callable[[int, str], Optional[str]]) -> Optional[str]:
    answer = None
    for seat, prompt in zip(seats(len(prompts)), prompts):
        answer = ask(seat, prompt)
        if answer is not None:
            break
    return answer


@dataclass
class BatchWorker:
    name: str
    outdir: Path
    engine: Callable[[int, dict], dict]
    open_claims: List[Claim] = field(default_factory=list)
    recent: Deque[int] = field(default_factory=lambda: collections.deque(maxlen=4))
    failures: int = 0

    def process(self, path: Path) -> int:
        claim = claim_shard(path.name, self.name)  # clean: dropped on both ways
        if claim is None:
            return 0
        seat = sit()  # clean: near miss, a missing seat drops the claim
        if seat is None:
            drop_claim(claim)
            return 0
        with open(self.outdir / path.name, "w") as out:  # clean: closed by with
            for req in read_requests(path):
                out.write(json.dumps(self.engine(seat, req)) + "\n")
                claim.lines += 1
        stand(seat)
        drop_claim(claim)
        return claim.lines

    def process_if_small(self, path: Path, limit: int) -> int:
        claim = claim_shard(path.name, self.name)  # leak: a shard above the limit is left claimed
        if claim is None:
            return 0
        n = count_lines(path, limit + 1)
        if n > limit:
            self.failures += 1
            return 0
        claim.lines = n
        drop_claim(claim)
        return n

    def claim_ahead(self, shards: List[str]) -> int:
        for shard in shards:
            claim = claim_shard(shard, self.name)  # clean: near miss, settle() and abandon() drop them
            if claim is None:
                continue
            self.open_claims.append(claim)
        return len(self.open_claims)

    def settle(self, shard: str) -> bool:
        for i, claim in enumerate(self.open_claims):
            if claim.shard == shard:
                drop_claim(self.open_claims.pop(i))
                return True
        return False

    def abandon(self) -> None:
        while self.open_claims:
            drop_claim(self.open_claims.pop())

    def keep_warm(self) -> int:
        """Holds on to the seats used last."""
        seat = sit()  # leak: the deque is bounded, its oldest seat falls out without stand()
        if seat is not None:
            self.recent.append(seat)
        return len(self.recent)

    def cool_down(self) -> None:
        while self.recent:
            stand(self.recent.popleft())
