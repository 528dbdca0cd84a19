"""GPU slots for LoRA adapters and reference-held host copies."""
import threading
from dataclasses import dataclass
from typing import Optional


@dataclass
class SlotRecord:
    taken: bool = False
    adapter: Optional[str] = None


class SlotBoard:
    """Fixed stack of LoRA weight rows; a flag says which are taken."""

    def __init__(self, max_loras: int) -> None:
        self.records = [SlotRecord() for _ in range(max_loras)]

    def occupy(self) -> int:
        for index, record in enumerate(self.records):
            if not record.taken:
                record.taken = True
                return index
        return -1

    def vacate(self, index: int) -> None:
        self.records[index].taken = False
        self.records[index].adapter = None


class HostAdapter:
    """Weights in host memory, unmapped when the last holder lets go."""

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.path = path
        self.rank = 0
        self.weights: Optional[bytes] = None
        self._holders = 0

    def hold(self) -> "HostAdapter":
        self._holders += 1
        return self

    def let_go(self) -> None:
        self._holders -= 1
        if self._holders == 0:
            self.weights = None

    def load(self) -> bool:
        handle = open(self.path, "rb")  # leak: an unknown header returns without closing
        if handle.read(4) != b"LORA":
            return False
        self.rank = int.from_bytes(handle.read(4), "little")
        self.weights = handle.read()
        handle.close()
        return True


class AdapterCatalog:
    def __init__(self) -> None:
        self._by_name: dict[str, HostAdapter] = {}
        self._guard = threading.Lock()

    def checkout(self, name: str) -> Optional[HostAdapter]:
        with self._guard:
            adapter = self._by_name.get(name)
            if adapter is None:
                return None
            return adapter.hold()  # clean: the held adapter goes to the caller

    def load_checked(self, name: str) -> Optional[HostAdapter]:
        adapter = self.checkout(name)  # clean: near miss, let go when loading fails
        if adapter is None:
            return None
        if adapter.weights is None and not adapter.load():
            adapter.let_go()
            return None
        return adapter


class LoraWorker:
    def __init__(self, board: SlotBoard, catalog: AdapterCatalog, max_rank: int) -> None:
        self.board = board
        self.catalog = catalog
        self.max_rank = max_rank
        self.active: dict[str, tuple[int, HostAdapter]] = {}
        self.pinned: dict[str, HostAdapter] = {}
        self.base_slot = board.occupy()  # leak: shutdown() never vacates the base slot

    def activate(self, name: str) -> bool:
        if name in self.active:
            return True
        adapter = self.catalog.load_checked(name)  # clean: near miss, each refusal lets go, else kept in active
        if adapter is None:
            return False
        if adapter.rank > self.max_rank:
            adapter.let_go()
            return False
        slot = self.board.occupy()  # clean: sentinel-checked, kept in active
        if slot < 0:
            adapter.let_go()
            return False
        self.board.records[slot].adapter = name
        self.active[name] = (slot, adapter)
        return True

    def hot_swap(self, old: str, new: str) -> bool:
        """Replace one active adapter in place."""
        adapter = self.catalog.load_checked(new)  # leak: oversized rank returns with the adapter held
        if adapter is None:
            return False
        if adapter.rank > self.max_rank:
            return False
        slot, previous = self.active.pop(old)
        previous.let_go()
        self.board.records[slot].adapter = new
        self.active[new] = (slot, adapter)
        return True

    def activate_many(self, names: list[str]) -> list[str]:
        missing = []
        for name in names:
            if name in self.active:
                continue
            slot = self.board.occupy()  # leak: a missing adapter continues with the slot taken
            if slot < 0:
                break
            adapter = self.catalog.load_checked(name)  # clean: stored in active
            if adapter is None:
                missing.append(name)
                continue
            self.board.records[slot].adapter = name
            self.active[name] = (slot, adapter)
        return missing

    def pin(self, name: str) -> None:
        if name not in self.pinned:
            adapter = self.catalog.checkout(name)  # clean: stored in pinned, shutdown() lets go
            if adapter is not None:
                self.pinned[name] = adapter

    def rank_of(self, name: str) -> int:
        adapter = self.catalog.checkout(name)  # leak: only read, never let go
        return adapter.rank if adapter is not None else 0

    def deactivate(self, name: str) -> None:
        slot, adapter = self.active.pop(name)
        self.board.vacate(slot)
        adapter.let_go()

    def shutdown(self) -> None:
        for name in list(self.active):
            self.deactivate(name)
        for adapter in self.pinned.values():
            adapter.let_go()
        self.pinned.clear()
