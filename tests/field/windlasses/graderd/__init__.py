"""Reward grading daemon: runs model outputs in sandboxes under licences."""
from .grader import Grader
from .pools import JailPool, LicenceServer
from .scope import GradeScope, Ticket

__all__ = ["GradeScope", "Grader", "JailPool", "LicenceServer", "Ticket"]
