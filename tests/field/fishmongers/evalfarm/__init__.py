"""Runs model written programs in sandboxes and grades them."""
from .grader import Grader
from .ports import NoPorts, PortRange
from .runner import Dialog, Runner, Verdict
from .sandboxes import BootFailed, FarmBusy, Sandbox, SandboxPool

__all__ = [
    "BootFailed", "Dialog", "FarmBusy", "Grader", "NoPorts", "PortRange", "Runner", "Sandbox", "SandboxPool", "Verdict",
]
