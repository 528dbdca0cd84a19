"""Worker ranks of a training cluster: one integer bitmap per group in a module level table."""
import logging
import threading

log = logging.getLogger("ranks")

WIDTH = 64
_groups: dict[str, int] = {}
_guard = threading.Lock()


def claim_bit(group: str) -> int:
    """Lowest clear bit of the group, now set; -1 when all are set."""
    with _guard:
        word = _groups.get(group, 0)
        for bit in range(WIDTH):
            if not word >> bit & 1:
                _groups[group] = word | 1 << bit
                return bit
    return -1


def clear_bit(group: str, bit: int) -> None:
    with _guard:
        _groups[group] = _groups.get(group, 0) & ~(1 << bit)


def claim_pair(group: str) -> tuple[int, int]:
    """Two ranks or (-1, -1)."""
    a = claim_bit(group)  # clean: cleared when there is no second, else handed on
    if a < 0:
        return -1, -1
    b = claim_bit(group)  # clean: handed on
    if b < 0:
        clear_bit(group, a)
        return -1, -1
    return a, b


def occupancy(group: str) -> int:
    return bin(_groups.get(group, 0)).count("1")


def run_probe(group: str, launcher) -> bool:
    rank = claim_bit(group)  # leak: rank 0 is taken for none and stays set
    if not rank or rank < 0:
        return False
    healthy = launcher.ping(group, rank)
    clear_bit(group, rank)
    return healthy


def run_check(group: str, launcher) -> bool:
    rank = claim_bit(group)  # clean: near miss, compared with -1 and cleared
    if rank == -1:
        return False
    healthy = launcher.ping(group, rank)
    clear_bit(group, rank)
    return healthy


def allreduce_smoke(group: str, launcher, size: int) -> float:
    first, second = claim_pair(group)  # leak: the second rank is not cleared
    if first < 0:
        return -1.0
    seconds = launcher.exchange(group, first, second, size)
    log.info("%s: %d-%d in %.3f", group, first, second, seconds)
    clear_bit(group, first)
    return seconds


def sendrecv_smoke(group: str, launcher, size: int) -> float:
    pair = claim_pair(group)  # clean: near miss, both are cleared in the loop
    if -1 in pair:
        return -1.0
    seconds = launcher.exchange(group, *pair, size)
    for rank in pair:
        clear_bit(group, rank)
    return seconds


class Gang:
    """The ranks of one job."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.ranks: list[int] = []
        self.spare = -1

    def grow(self, count: int) -> bool:
        for _ in range(count):
            rank = claim_bit(self.group)  # clean: near miss, kept in ranks, cleared in dissolve
            if rank < 0:
                return False
            self.ranks.append(rank)
        return True

    def keep_spare(self) -> None:
        self.spare = claim_bit(self.group)  # leak: dissolve does not clear the spare

    def replace(self, lost: int) -> bool:
        fresh = claim_bit(self.group)  # clean: takes the place of the lost one in ranks
        if fresh < 0:
            return False
        at = self.ranks.index(lost)
        self.ranks[at] = fresh
        clear_bit(self.group, lost)
        return True

    def dissolve(self) -> None:
        while self.ranks:
            clear_bit(self.group, self.ranks.pop())
        log.info("%s dissolved, %d ranks still set", self.group, occupancy(self.group))
