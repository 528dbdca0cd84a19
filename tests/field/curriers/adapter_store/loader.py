"""Reads adapter files from disk and installs them."""
from __future__ import annotations

import json
import os
from typing import Dict, List, Optional

from .registry import Adapter, AdapterRegistry
from .slots import AdapterSlots, SlotsFull


class AdapterLoader:
    def __init__(self, root: str, registry: AdapterRegistry) -> None:
        self.root = root
        self.registry = registry
        self.preloaded: Dict[str, int] = {}

    def read_config(self, adapter_id: str) -> Optional[dict]:
        path = os.path.join(self.root, adapter_id, "adapter_config.json")
        if not os.path.exists(path):
            return None
        f = open(path)  # leak: a file of another peft type returns without close
        cfg = json.loads(f.read() or "{}")
        if cfg.get("peft_type") != "LORA":
            return None
        f.close()
        return cfg

    def read_weights(self, adapter_id: str) -> bytes:
        f = open(os.path.join(self.root, adapter_id, "adapter.bin"), "rb")  # clean: closed in the finally
        try:
            header = f.read(8)
            if not header:
                return b""
            return header + f.read()
        finally:
            f.close()

    def preload(self, adapter_id: str) -> bool:
        slots: AdapterSlots = self.registry.slots
        try:
            slot = slots.reserve(adapter_id)  # leak: a preload of the same id overwrites the entry that holds the first slot
        except SlotsFull:
            return False
        self.preloaded[adapter_id] = slot
        return True

    def drop_preloaded(self) -> int:
        n = 0
        while self.preloaded:
            _, slot = self.preloaded.popitem()
            self.registry.slots.unreserve(slot)
            n += 1
        return n

    def promote(self, adapter_id: str, rank: int) -> Optional[Adapter]:
        if adapter_id in self.registry.adapters:
            return self.registry.adapters[adapter_id]
        slot = self.preloaded.pop(adapter_id, None)
        if slot is None:
            slot = self.registry.slots.try_reserve(adapter_id)  # clean: owned by the adapter that is registered
        if slot is None:
            return None
        adapter = Adapter(adapter_id, rank, slot)
        self.registry.adapters[adapter_id] = adapter
        return adapter

    def load_group(self, ids: List[str]) -> List[int]:
        taken: List[int] = []
        try:
            for adapter_id in ids:
                taken.append(self.registry.slots.reserve(adapter_id))  # clean: near miss, those taken so far are rolled back when full; else returned
        except SlotsFull:
            for slot in taken:
                self.registry.slots.unreserve(slot)
            return []
        return taken

    def load_pair(self, base: str, draft: str) -> Optional[tuple]:
        try:
            a = self.registry.slots.reserve(base)  # leak: not rolled back when the second reserve raises SlotsFull, which is caught
            b = self.registry.slots.reserve(draft)  # clean: returned to the caller
        except SlotsFull:
            return None
        return a, b
