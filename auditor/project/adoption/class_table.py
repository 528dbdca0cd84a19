"""Every class of the project by name, and what each inherits; re-exports are followed, cycles are not a
trap.
"""

from collections.abc import Iterator
from dataclasses import replace

from auditor.source.entries import ClassIndex, FileIndex, module_name


class ClassTable:
    def __init__(self, files: list[FileIndex]) -> None:
        self._files = files
        self._by_dotted: dict[str, ClassIndex] = {}
        self._by_name: dict[str, list[str]] = {}
        self._renames: dict[str, str] = {}
        self._modules: set[str] = set()
        self._bases: dict[tuple[str, str], list[ClassIndex]] = {}
        """What `_bases_of` found, for lineages share their upper parts."""
        for file in files:
            module = module_name(file.path)
            self._modules.add(module)
            for each in file.classes:
                dotted = f"{module}.{each.qualname}"
                self._by_dotted[dotted] = each
                self._by_name.setdefault(each.name, []).append(dotted)
            for bound, dotted in file.renames:
                self._renames[f"{module}.{bound}"] = dotted

    def classes(self) -> Iterator[ClassIndex]:
        """Every class as its own file shows it."""
        for file in self._files:
            yield from file.classes

    def that_matter(self) -> list[ClassIndex]:
        """Every class that can have a row, with what it inherits: those that allocate, and those that go
        about a pool themselves or by what they inherit.
        """
        named = self._heirs_of({each.name for each in self.classes() if _goes_about_pool(each)})
        return [self.effective(each) for each in self.classes() if each.allocations or each.name in named]

    def _heirs_of(self, names: set[str]) -> set[str]:
        """These names, and those of all classes that may inherit from one of them."""
        known: set[str] = set()
        while names != known:
            known = names
            names = names | {
                bound.rpartition(".")[2]
                for bound, dotted in self._renames.items()
                if dotted.rpartition(".")[2] in known
            }
            names |= {
                each.name
                for each in self.classes()
                if any(base.rpartition(".")[2] in names for base in each.bases)
            }
        return names

    def has_module(self, dotted: str) -> bool:
        """Whether an imported module is one of the project's files, whatever folder the run started in."""
        tail = dotted.lstrip(".")
        return dotted.startswith(".") or any(
            module == tail or module.endswith("." + tail) or tail.endswith("." + module)
            for module in self._modules
        )

    def effective(self, entry: ClassIndex) -> ClassIndex:
        """The class with what it inherits: being a module, the switch of an inherited `__init__`, pool
        use, cleanup.
        """
        for base in self.ancestors(entry):
            entry = _inherit(entry, base)
        return entry

    def ancestors(self, entry: ClassIndex) -> Iterator[ClassIndex]:
        """The classes of the project it derives from, nearest first, each once."""
        seen = {(entry.span.path, entry.qualname)}
        waiting = [entry]
        while waiting:
            for base in self._bases_of(waiting.pop(0)):
                if (key := (base.span.path, base.qualname)) not in seen:
                    seen.add(key)
                    waiting.append(base)
                    yield base

    def _bases_of(self, entry: ClassIndex) -> list[ClassIndex]:
        key = (entry.span.path, entry.qualname)
        if key not in self._bases:
            found = (self.resolve(name, entry) for name in entry.bases)
            self._bases[key] = [base for base in found if base is not None]
        return self._bases[key]

    def resolve(self, dotted: str, user: ClassIndex) -> ClassIndex | None:
        """The class that `dotted` names in the file of `user`: its own, an imported or a re-exported one."""
        own = f"{module_name(user.span.path)}.{dotted}"
        for _ in range(8):  # a chain of renames longer than that is a cycle
            found = self._by_dotted.get(own) or self._by_dotted.get(dotted) or self._suffixed(dotted)
            if found is not None or dotted not in self._renames:
                return found
            dotted = self._renames[dotted]
        return None

    def _suffixed(self, dotted: str) -> ClassIndex | None:
        """Re-exported names and other roots: the one class of that name below, or ending like, the dotted
        package.
        """
        package, dot, name = dotted.rpartition(".")
        if not dot:
            return None
        top = package.split(".")
        fits = [
            each
            for each in self._by_name.get(name, ())
            if each.endswith("." + dotted) or _below(each, package) or each.startswith(top[0] + ".")
        ]
        exact = [each for each in fits if each.endswith("." + dotted) or _below(each, package)]
        chosen = exact or fits
        return self._by_dotted[chosen[0]] if len(chosen) == 1 else None

    def child_pools(self, entry: ClassIndex) -> bool:
        """Whether something it builds pools for it."""
        for name in entry.builds:
            child = self.resolve(name, entry)
            if child is not None and (child.acquires or child.mentions_pool):
                return True
        return False


def _below(dotted: str, package: str) -> bool:
    return f".{dotted}".find(f".{package}.") >= 0


def _speaks_of_pool(entry: ClassIndex) -> bool:
    return entry.mentions_pool or entry.switch is not None or entry.defines_pool


def _goes_about_pool(entry: ClassIndex) -> bool:
    return _speaks_of_pool(entry) or entry.acquires or entry.releases


def _inherit(entry: ClassIndex, base: ClassIndex) -> ClassIndex:
    adds_init = base.has_init and not entry.has_init
    if not (adds_init or base.cleans_up or _speaks_of_pool(base) or (base.is_module and not entry.is_module)):
        return entry
    takes_switch = entry.switch is None and not entry.has_init
    return replace(
        entry,
        is_module=entry.is_module or base.is_module,
        has_init=entry.has_init or base.has_init,
        switch=base.switch if takes_switch else entry.switch,
        switch_default=base.switch_default if takes_switch else entry.switch_default,
        acquires=entry.acquires or base.acquires,
        releases=entry.releases or base.releases,
        cleans_up=entry.cleans_up or base.cleans_up,
        mentions_pool=entry.mentions_pool or base.mentions_pool,
    )
