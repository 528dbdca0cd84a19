"""Multi-turn chat server keeping KV of idle conversations."""
from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional

logger = logging.getLogger("chat.server")


class KVCacheManager:
    def __init__(self, total: int) -> None:
        self.total = total
        self._free_list = list(range(total))
        self.peak = 0

    def allocate(self, n: int) -> List[int]:
        if n > len(self._free_list):
            raise MemoryError(f"want {n} blocks, have {len(self._free_list)}")
        out = [self._free_list.pop() for _ in range(n)]  # clean: handed to the caller
        self.peak = max(self.peak, self.total - len(self._free_list))
        return out

    def free(self, blocks: List[int]) -> None:
        self._free_list.extend(blocks)

    @property
    def available(self) -> int:
        return len(self._free_list)


@dataclass
class Turn:
    text: str
    blocks: List[int] = field(default_factory=list)


@dataclass
class Conversation:
    cid: str
    turns: List[Turn] = field(default_factory=list)
    touched: float = 0.0

    def all_blocks(self) -> List[int]:
        return [b for t in self.turns for b in t.blocks]


class ChatServer:
    def __init__(self, kv: KVCacheManager, generate: Callable[[str, List[int]], str], block_chars: int = 64) -> None:
        self.kv = kv
        self.generate = generate
        self.block_chars = block_chars
        self.live: "OrderedDict[str, Conversation]" = OrderedDict()
        self.metrics: Dict[str, int] = {}

    def _blocks_needed(self, text: str) -> int:
        return max(1, -(-len(text) // self.block_chars))

    def _count(self, key: str) -> None:
        self.metrics[key] = self.metrics.get(key, 0) + 1

    def _evict_until(self, n: int) -> None:
        while self.kv.available < n and self.live:
            _, conv = self.live.popitem(last=False)
            self.kv.free(conv.all_blocks())
            self._count("evicted")

    def chat(self, cid: str, text: str) -> str:
        need = self._blocks_needed(text)
        self._evict_until(need)
        blocks = self.kv.allocate(need)  # clean: near miss, in the turn of a live conversation, end() and eviction free it
        conv = self.live.setdefault(cid, Conversation(cid))
        conv.turns.append(Turn(text, blocks))
        conv.touched = time.time()
        self.live.move_to_end(cid)
        return self.generate(text, conv.all_blocks())

    def chat_once(self, text: str) -> str:
        blocks = self.kv.allocate(self._blocks_needed(text))  # clean: freed in finally
        try:
            return self.generate(text, blocks)
        finally:
            self.kv.free(blocks)

    def regenerate(self, cid: str) -> Optional[str]:
        """Answer the last turn again in blocks of its own."""
        conv = self.live.get(cid)
        if conv is None or not conv.turns:
            return None
        last = conv.turns[-1]
        last.blocks = self.kv.allocate(len(last.blocks))  # leak: the blocks of the former answer are overwritten
        return self.generate(last.text, conv.all_blocks())

    def edit_last(self, cid: str, text: str) -> Optional[str]:
        conv = self.live.get(cid)
        if conv is None or not conv.turns:
            return None
        old = conv.turns.pop()
        self.kv.free(old.blocks)
        conv.turns.append(Turn(text, self.kv.allocate(self._blocks_needed(text))))  # clean: near miss, the turn it replaces has been freed
        return self.generate(text, conv.all_blocks())

    def moderate(self, cid: str, text: str, banned: List[str]) -> Optional[str]:
        blocks = self.kv.allocate(self._blocks_needed(text))  # leak: a banned word refuses the turn, its blocks stay allocated
        lowered = text.lower()
        for word in banned:
            if word in lowered:
                self._count("refused")
                return None
        conv = self.live.setdefault(cid, Conversation(cid))
        conv.turns.append(Turn(text, blocks))
        return self.generate(text, conv.all_blocks())

    def batch(self, texts: List[str]) -> List[str]:
        leases: List[List[int]] = []
        answers: List[str] = []
        try:
            for t in texts:
                leases.append(self.kv.allocate(self._blocks_needed(t)))  # clean: near miss, finally frees those gathered up to a MemoryError
            for t, blocks in zip(texts, leases):
                answers.append(self.generate(t, blocks))
        finally:
            for blocks in leases:
                self.kv.free(blocks)
        return answers

    def batch_dedup(self, texts: List[str]) -> Dict[str, str]:
        held: Dict[str, List[int]] = {}
        for t in texts:
            held[t] = self.kv.allocate(self._blocks_needed(t))  # leak: a text that occurs twice overwrites its own entry
        answers = {t: self.generate(t, b) for t, b in held.items()}
        for b in held.values():
            self.kv.free(b)
        return answers

    def admit(self, text: str) -> bool:
        try:
            self.kv.allocate(self._blocks_needed(text))  # leak: the admission check discards what it allocated
        except MemoryError:
            return False
        return True

    def end(self, cid: str) -> None:
        conv = self.live.pop(cid, None)
        if conv is not None:
            self.kv.free(conv.all_blocks())

    def forget_turns(self, cid: str, keep: int) -> int:
        conv = self.live.get(cid)
        if conv is None:
            return 0
        old, conv.turns = conv.turns[:-keep], conv.turns[-keep:]
        for t in old:
            self.kv.free(t.blocks)
        return len(old)

    def drain(self) -> None:
        for cid in list(self.live):
            self.end(cid)
