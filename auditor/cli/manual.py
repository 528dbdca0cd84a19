"""The lower half of a command's help: examples, and the files it reads and writes."""

from collections.abc import Mapping

WIDTH = 78  # what an indented line of help may take on a terminal of 80 columns


def manual(examples: Mapping[str, str], files: Mapping[str, str] | None = None) -> str:
    """An epilog for click: each example with what it does, each file with what it is for."""
    parts = ["\b\nExamples:\n" + "\n".join(f"  {line}\n      {text}" for line, text in examples.items())]
    if files:
        parts.append("\b\nFiles:\n" + "\n".join(f"  {name}\n      {text}" for name, text in files.items()))
    return "\n\n".join(parts)


SETTINGS = {
    "poolaudit.toml, pyproject.toml": "Settings; the nearest upwards ([tool.poolaudit] in the latter).",
}
CACHE = {".poolaudit_cache/": "The cache, beside the settings; it may be deleted."}
