from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Callable, Optional


@dataclass(eq=False)
class LoadedModel:
    model_id: str
    run: Callable[[str], str]
    users: int = 0


class ModelCache:
    def __init__(self, loader: Callable[[str], Optional[Callable[[str], str]]], capacity: int) -> None:
        self.loader = loader
        self.capacity = capacity
        self._models: OrderedDict[str, LoadedModel] = OrderedDict()

    def _make_room(self) -> bool:
        if len(self._models) < self.capacity:
            return True
        for model_id, model in self._models.items():
            if model.users == 0:
                del self._models[model_id]
                return True
        return False

    def acquire_model(self, model_id: str) -> Optional[LoadedModel]:
        model = self._models.get(model_id)
        if model is None:
            if not self._make_room():
                return None
            run = self.loader(model_id)
            if run is None:
                return None
            model = self._models[model_id] = LoadedModel(model_id, run)
        self._models.move_to_end(model_id)
        model.users += 1
        return model

    def release_model(self, model: LoadedModel) -> None:
        model.users -= 1

    def preload(self, model_ids: list[str]) -> list[str]:
        ready: list[str] = []
        for model_id in model_ids:
            model = self.acquire_model(model_id)  # leak: only the id is kept, so the model can never be unloaded
            if model is not None:
                ready.append(model.model_id)
        return ready

    def touch(self, model_ids: list[str]) -> int:
        n = 0
        for model_id in model_ids:
            model = self.acquire_model(model_id)  # clean: near miss, dropped in the same turn where there was one
            if model is None:
                continue
            n += 1
            self.release_model(model)
        return n
