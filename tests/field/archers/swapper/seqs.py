from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from .blocks import BlockPool, HostBlock, TieredHostPool


class State(Enum):
    WAITING = auto()
    RUNNING = auto()
    MOVING = auto()
    SWAPPED = auto()
    ENDED = auto()


@dataclass(eq=False)
class Sequence:
    sid: str
    length: int
    state: State = State.WAITING
    gpu: list[int] = field(default_factory=list)
    cpu: list[HostBlock] = field(default_factory=list)
    lookahead: list[int] = field(default_factory=list)
    aborted: bool = False
    reason: str = ""

    def promote(self) -> None:
        """The look-ahead blocks become ordinary ones."""
        self.gpu += self.lookahead
        self.lookahead = []

    def release(self, gpu: BlockPool, host: TieredHostPool) -> None:
        gpu.free(self.gpu)
        host.free(self.cpu)
        self.gpu, self.cpu = [], []
        self.state = State.ENDED
