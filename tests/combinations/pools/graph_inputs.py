# take: P.suit_up(n)
# give: P.hang(X)
# gets: optional
# type: CapturedInputWardrobe
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class InputSet:
    bs: int
    input_ids: torch.Tensor = field(repr=False)
    positions: torch.Tensor = field(repr=False)
    worn: bool = False


class CapturedInputWardrobe:
    """Static inputs for CUDA graph replays, `depth` sets for every captured batch size."""

    def __init__(self, capture_sizes=(1, 2, 4, 8, 16), depth=2):
        self.sets = [
            InputSet(bs, torch.zeros(bs, dtype=torch.long), torch.zeros(bs, dtype=torch.long))
            for bs in sorted(capture_sizes)
            for _ in range(depth)
        ]

    def suit_up(self, batch_size):
        for s in self.sets:
            if s.bs >= batch_size and not s.worn:
                s.worn = True
                return s
        return None  # caller runs eagerly

    def hang(self, s):
        assert s.worn, "input set was not in use"
        s.input_ids.zero_()
        s.worn = False
