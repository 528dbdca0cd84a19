from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Flat:
    index: int
    values: list[float]
    spans: list[tuple[str, int, int]] = field(default_factory=list)

    def reset(self) -> None:
        self.spans.clear()

    def room(self) -> int:
        return len(self.values) - (self.spans[-1][2] if self.spans else 0)

    def push(self, name: str, grad: list[float]) -> None:
        start = self.spans[-1][2] if self.spans else 0
        self.values[start : start + len(grad)] = grad
        self.spans.append((name, start, start + len(grad)))


class FlatBuffers:
    """Flat communication buffers, reused from step to step."""

    def __init__(self, count: int, numel: int) -> None:
        self.numel = numel
        self._shelf = [Flat(i, [0.0] * numel) for i in range(count)]

    def fetch(self) -> Flat:
        if not self._shelf:
            self._shelf.append(Flat(-1, [0.0] * self.numel))
        return self._shelf.pop()

    def store(self, flat: Flat) -> None:
        flat.reset()
        self._shelf.append(flat)

    @property
    def shelved(self) -> int:
        return len(self._shelf)
