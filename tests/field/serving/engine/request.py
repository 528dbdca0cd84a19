from __future__ import annotations

import dataclasses
import typing as t

from .resources import AdapterLease


@dataclasses.dataclass
class EngineRequest:
    rid: str
    prompt: t.List[int]
    adapter: t.Optional[str] = None
    n: int = 1
    seq_id: t.Optional[int] = None
    blocks: t.List[int] = dataclasses.field(default_factory=list)
    lease: t.Optional[AdapterLease] = None
    children: t.List["EngineRequest"] = dataclasses.field(default_factory=list)

    @property
    def admitted(self) -> bool:
        return self.seq_id is not None
