from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional


@dataclass
class MMRequest:
    rid: str
    images: List[bytes] = field(default_factory=list)
    audio: Optional[bytes] = None
    slots: List[int] = field(default_factory=list)
    audio_slot: Optional[int] = None
    shared: Dict[str, int] = field(default_factory=dict)
    aborted: bool = False
