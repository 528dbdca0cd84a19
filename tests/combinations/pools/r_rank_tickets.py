# take: P.draw_ticket()
# give: X.close()
# gets: optional
# type: RankOffice
import heapq


class RankTicket:
    __slots__ = ("rank", "_office")

    def __init__(self, rank, office):
        self.rank = rank
        self._office = office

    def close(self):
        office, self._office = self._office, None
        if office is not None:
            office._readmit(self.rank)


class RankOffice:
    """Elastic worker ranks: the lowest vacant one is always handed out first."""

    def __init__(self, world_size):
        self.world_size = world_size
        self._vacant = list(range(world_size))

    def draw_ticket(self):
        try:
            rank = heapq.heappop(self._vacant)
        except IndexError:
            return None
        return RankTicket(rank, self)

    def _readmit(self, rank):
        heapq.heappush(self._vacant, rank)

    def __len__(self):
        return self.world_size - len(self._vacant)
