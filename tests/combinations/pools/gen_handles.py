# take: P.mint()
# give: P.void(X)
# gets: value
# type: HandleMint
from typing import List, Tuple

Handle = Tuple[int, int]  # (index, generation)


class HandleMint:
    """Generational indices for in-flight transfers; an odd generation means live."""

    def __init__(self) -> None:
        self._gen: List[int] = []
        self._dead: List[int] = []

    def is_live(self, h: Handle) -> bool:
        idx, gen = h
        return self._gen[idx] == gen and gen % 2 == 1

    def mint(self) -> Handle:
        if self._dead:
            idx = self._dead.pop()
        else:
            idx = len(self._gen)
            self._gen.append(0)
        self._gen[idx] += 1
        return idx, self._gen[idx]

    def void(self, h: Handle) -> None:
        if not self.is_live(h):
            raise ValueError(f"stale handle {h}")
        self._gen[h[0]] += 1
        self._dead.append(h[0])
