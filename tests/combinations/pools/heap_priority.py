# take: P.cheapest()
# give: P.put_away(X)
# gets: optional
import heapq


class Pool:
    def __init__(self, costs):
        self._costs = costs
        self._heap = [(cost, index) for index, cost in enumerate(costs)]
        heapq.heapify(self._heap)

    def cheapest(self):
        if not self._heap:
            return None
        _, index = heapq.heappop(self._heap)
        return index

    def put_away(self, index):
        heapq.heappush(self._heap, (self._costs[index], index))
