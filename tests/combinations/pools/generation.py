# take: P.make_handle()
# give: P.retire(X)
# gets: optional
@dataclass(frozen=True)
class Handle:
    index: int
    generation: int


class Pool:
    def __init__(self, count):
        self._open = list(range(count))
        self._generations = [0] * count

    def make_handle(self):
        if not self._open:
            return None
        index = self._open.pop()
        return Handle(index, self._generations[index])

    def retire(self, handle):
        if self._generations[handle.index] != handle.generation:
            raise KeyError(handle)
        self._generations[handle.index] += 1
        self._open.append(handle.index)
