"""Tool changer of a two-armed assembly robot."""
from dataclasses import dataclass, field
from typing import Optional


@dataclass
class Tool:
    name: str
    wear: float = 0.0


@dataclass
class Magazine:
    tools: dict = field(default_factory=dict)

    def fetch_tool(self, name) -> Optional[Tool]:
        return self.tools.pop(name, None)

    def stow(self, tool):
        self.tools[tool.name] = tool


class Arm:
    def __init__(self, reach):
        self.reach = reach
        self.mounted = None

    def offer(self, tool, distance):
        """Mounts the tool if the arm is bare and near enough; says whether it did."""
        if self.mounted is not None or distance > self.reach:
            return False
        self.mounted = tool
        return True

    def unmount(self, magazine):
        if self.mounted is not None:
            magazine.stow(self.mounted)
            self.mounted = None


class Cell:
    def __init__(self, magazine, left, right):
        self.magazine = magazine
        self.left, self.right = left, right
        self.history = []

    def equip_left(self, name, distance):
        tool = self.magazine.fetch_tool(name)  # clean: stowed when the arm declines
        if tool is None:
            return False
        if not self.left.offer(tool, distance):
            self.magazine.stow(tool)
            return False
        self.history.append((name, "left"))
        return True

    def equip_right(self, name, distance):
        tool = self.magazine.fetch_tool(name)  # leak: the arm may decline
        if tool is None:
            return False
        if self.right.offer(tool, distance):
            self.history.append((name, "right"))
            return True
        self.history.append((name, "declined"))
        return False

    def equip_any(self, name, distance):
        tool = self.magazine.fetch_tool(name)  # clean: left, right or stowed
        if tool is None:
            return None
        for arm in (self.left, self.right):
            if arm.offer(tool, distance):
                return arm
        self.magazine.stow(tool)
        return None

    def wear_of(self, name):
        tool = self.magazine.fetch_tool(name)  # leak: the worn tool is returned as a number only
        if tool is None:
            return 0.0
        if tool.wear > 0.8:
            return tool.wear
        self.magazine.stow(tool)
        return tool.wear

    def polish(self, name):
        tool = self.magazine.fetch_tool(name)  # clean: stowed
        if tool:
            tool.wear = max(0.0, tool.wear - 0.1)
            self.magazine.stow(tool)
