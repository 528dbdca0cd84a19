"""The mixin as a file of the project's own: one a package, imported relatively."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from auditor.adopt.draft import Refused
from auditor.adopt.inheritance import MIXIN, STANDARD
from auditor.source.discover import SourceFile

FILE = "memory_pool_mixin.py"


def standard_source() -> bytes:
    """The standard mixin's file, read and not imported: it needs torch, and we do not."""
    package, _, module = STANDARD.partition(".")
    spec = find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        if (file := Path(folder) / f"{module}.py").is_file():
            return file.read_bytes()
    raise Refused(f"{STANDARD} is not installed beside poolaudit, so it cannot be copied")


@dataclass
class Vendored:
    """Gives each file the module to import from, and remembers which copies must be written."""

    files: Mapping[str, SourceFile]
    copies: dict[Path, bytes] = field(default_factory=dict)

    def __call__(self, path: str) -> str:
        own = Path(self.files[path].location).parent
        root, depth = _package(own)
        target = root / FILE
        if not target.exists():
            self.copies[target] = standard_source()
        elif f"class {MIXIN}" not in target.read_text(encoding="utf-8", errors="replace"):
            raise Refused(f"{target} exists and has no {MIXIN}; rename it, or use --mixin import")
        dots = "." * depth
        return f"{dots}{Path(FILE).stem}"


def _package(folder: Path) -> tuple[Path, int]:
    """The folder of the outermost package, and how many dots lead there; 0 where the file is in none."""
    depth = 0
    root = folder
    while (folder / "__init__.py").exists():
        root, depth, folder = folder, depth + 1, folder.parent
    return root, depth


def standard(path: str) -> str:
    """The module of the installed mixin, whatever file asks."""
    return STANDARD
