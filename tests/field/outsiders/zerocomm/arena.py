"""Arena of equally sized communication chunks."""
from typing import List, Optional

import torch


class ChunkArena:
    def __init__(self, chunk_numel: int, chunks: int, dtype=torch.float16) -> None:
        self.chunk_numel = chunk_numel
        self.slab = torch.zeros(chunks, chunk_numel, dtype=dtype)
        self.available: List[int] = list(range(chunks))

    def claim(self) -> Optional[int]:
        if not self.available:
            self._grow()
        return self.available.pop() if self.available else None

    def disclaim(self, chunk: int) -> None:
        self.available.append(chunk)

    def _grow(self) -> None:
        old = self.slab.shape[0]
        if old >= 1024:
            return
        extra = torch.zeros(old, self.chunk_numel, dtype=self.slab.dtype)
        self.slab = torch.cat([self.slab, extra])
        self.available.extend(range(old, 2 * old))

    def view(self, chunk: int, numel: int) -> torch.Tensor:
        return self.slab[chunk, :numel]
