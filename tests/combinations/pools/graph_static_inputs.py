# take: P.claim_for(n)
# give: P.unclaim(X)
# gets: value
# type: GraphInputSets
from dataclasses import dataclass, field

import torch


@dataclass
class StaticInputs:
    bs: int
    in_replay: bool = False
    input_ids: torch.Tensor = field(init=False)
    positions: torch.Tensor = field(init=False)

    def __post_init__(self):
        self.input_ids = torch.zeros(self.bs, dtype=torch.int32)
        self.positions = torch.zeros(self.bs, dtype=torch.int64)


class GraphInputSets:
    """Each captured graph owns one static input set; padded up to the next bs."""

    def __init__(self, capture_sizes):
        self._sets = [StaticInputs(bs) for bs in sorted(capture_sizes)]

    def _smallest_idle(self, bs):
        for s in self._sets:
            if s.bs >= bs and not s.in_replay:
                return s
        return None

    def claim_for(self, bs):
        found = self._smallest_idle(bs)
        if found is None:
            raise RuntimeError(f"no idle cuda-graph inputs for batch size {bs}")
        found.in_replay = True
        return found

    def unclaim(self, inputs):
        if not inputs.in_replay:
            raise RuntimeError("static inputs were not claimed")
        inputs.in_replay = False
