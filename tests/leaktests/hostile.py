"""A tree of modules that misbehave, one way each, beside two honest ones."""

from pathlib import Path

_HEAD = "import torch\nfrom torch import nn\n\n\n"
_MODULE = _HEAD + "class {name}(nn.Module):\n    def forward(self, x):\n        {body}\n"

FILES = {
    "honest.py": _MODULE.format(name="Honest", body="return x * 2"),
    "abstract.py": "from torch import nn\n\n\nclass Abstract(nn.Module):\n    pass\n",
    "imports_what_is_not_there.py": "import no_such_module_anywhere\n"
    + _HEAD
    + "class A(nn.Module):\n    pass\n",
    "exits_when_imported.py": _HEAD + "class B(nn.Module):\n    pass\n\n\n__import__('sys').exit(3)\n",
    "exits_when_run.py": _MODULE.format(name="Exits", body="raise SystemExit(4)"),
    "ends_the_process.py": _MODULE.format(name="Ends", body="__import__('os')._exit(5)"),
    "crashes.py": _MODULE.format(name="Crashes", body="__import__('os').kill(__import__('os').getpid(), 11)"),
    "hangs.py": _MODULE.format(name="Hangs", body="__import__('time').sleep(600)"),
    "reads_a_file.py": _MODULE.format(name="Reads", body="return open('/no/such/file').read()"),
    "reads_input.py": _MODULE.format(name="Asks", body="return input()"),
    "returns_text.py": _MODULE.format(name="Talks", body="return 'no tensor'"),
    "two_in_one.py": _MODULE.format(name="First", body="__import__('os')._exit(6)")
    + "\n\nclass Second(nn.Module):\n    def forward(self, x):\n        return x + 1\n",
}

SAID = {
    "Abstract": "nothing to test: it has no forward of its own",
    "A": "no plan: imports_what_is_not_there cannot be imported: ModuleNotFoundError: No module named",
    "B": "no plan: exits_when_imported cannot be imported: SystemExit: 3",
    "Exits": "no plan: SystemExit: 4",
    "Ends": "no plan: it ended the interpreter while it was tried (status 5)",
    "Crashes": "no plan: it crashed the interpreter while it was tried (SIGSEGV)",
    "Hangs": "no plan: it hung while it was tried and was ended; its stack follows",
    "Reads": "no plan: FileNotFoundError",
    "Asks": "no plan: EOFError",
    "Talks": "no plan: the call returned str, in which there is no tensor",
    "First": "no plan: it ended the interpreter while it was tried (status 6)",
}
"""By target, how its line goes on."""


def write_hostile_tree(folder: Path) -> Path:
    """All of it, into `folder`."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder
