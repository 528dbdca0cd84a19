# take: P.enlist()
# give: P.discharge(X)
# gets: optional
# type: RankRoster
from typing import Optional, Set


class RankRoster(object):
    """Elastic training: local ranks 0..world_size-1, a joining worker gets the smallest one."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self._serving: Set[int] = set()

    @property
    def vacancies(self) -> int:
        return self.world_size - len(self._serving)

    def enlist(self) -> Optional[int]:
        rank = min(set(range(self.world_size)) - self._serving, default=None)
        if rank is not None:
            self._serving.add(rank)
        return rank

    def discharge(self, rank: int) -> None:
        try:
            self._serving.remove(rank)
        except KeyError:
            raise ValueError(f"rank {rank} is not enlisted") from None
