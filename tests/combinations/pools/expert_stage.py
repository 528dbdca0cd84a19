# take: P.summon(key)
# give: P.relieve(key)
# gets: optional
# type: ExpertStage
from collections import OrderedDict


class ExpertStage:
    """GPU places for offloaded MoE experts. Idle experts stay resident until pushed out (LRU)."""

    def __init__(self, places, load):
        self._load = load  # load(expert, place): copies weights H2D
        self._empty = list(range(places))
        self._active = {}  # expert -> [place, users]
        self._idle = OrderedDict()  # expert -> place, oldest first

    def summon(self, expert):
        if expert in self._active:
            self._active[expert][1] += 1
            return self._active[expert][0]
        if expert in self._idle:
            place = self._idle.pop(expert)
        else:
            if not self._empty:
                if not self._idle:
                    return None
                _, evicted = self._idle.popitem(last=False)
                self._empty.append(evicted)
            self._load(expert, self._empty[-1])
            place = self._empty.pop()
        self._active[expert] = [place, 1]
        return place

    def relieve(self, expert):
        entry = self._active[expert]
        entry[1] -= 1
        if entry[1] == 0:
            del self._active[expert]
            self._idle[expert] = entry[0]
