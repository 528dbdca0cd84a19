from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, Optional

from .kv import KVManager, KVSpan


@dataclass(eq=False)
class GenRequest:
    rid: int
    prompt: List[int]
    max_new: int = 16
    kv: Optional[KVSpan] = None
    output: List[int] = field(default_factory=list)

    def pages_needed(self, page: int = 16) -> int:
        return -(-(len(self.prompt) + self.max_new) // page)

    def give_up_kv(self, mgr: KVManager) -> None:
        kv, self.kv = self.kv, None
        if kv is not None:
            mgr.relinquish(kv)
