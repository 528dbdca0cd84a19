"""The texts of an analysis with those of a few files replaced."""

from collections.abc import Iterable, Iterator, Mapping


class Edited(Mapping[str, str]):
    """`changed` names the replaced ones; every other text is read where it was read before."""

    def __init__(self, new: Mapping[str, str], old: Mapping[str, str], candidates: Iterable[str]) -> None:
        self._old = old
        self._new = {path: new[path] for path in candidates if path not in old or old[path] != new[path]}

    @property
    def changed(self) -> frozenset[str]:
        return frozenset(self._new)

    def __getitem__(self, path: str) -> str:
        return self._new[path] if path in self._new else self._old[path]

    def __iter__(self) -> Iterator[str]:
        yield from self._old
        yield from (path for path in self._new if path not in self._old)

    def __len__(self) -> int:
        return sum(1 for _ in self)
