# take: P.summon()
# give: P.dismiss(X)
# gets: optional
# type: TokenizerBench
import threading
from typing import Callable, Generic, List, Optional, TypeVar

T = TypeVar("T")


class TokenizerBench(Generic[T]):
    """HF fast tokenizers aren't re-entrant: every thread summons its own clone for a while."""

    def __init__(self, clone: Callable[[], T], seats: int = 4, patience: float = 5.0):
        self._clones: List[T] = [clone() for _ in range(seats)]
        self._someone_back = threading.Condition()
        self._patience = patience
        self.timeouts = 0

    def summon(self) -> Optional[T]:
        with self._someone_back:
            if self._someone_back.wait_for(lambda: self._clones, timeout=self._patience):
                return self._clones.pop()
            self.timeouts += 1
            return None

    def dismiss(self, tok: T) -> None:
        with self._someone_back:
            self._clones.append(tok)
            self._someone_back.notify()
