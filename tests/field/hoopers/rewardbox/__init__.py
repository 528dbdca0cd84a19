from .grader import Grader
from .pool import Ports, SandboxPool

__all__ = ["Grader", "Ports", "SandboxPool"]
