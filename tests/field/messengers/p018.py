"""Register allocation of a small shader compiler."""
from dataclasses import dataclass
from typing import Any


@dataclass
class Const:
    value: float


@dataclass
class Load:
    symbol: str


@dataclass
class Add:
    left: Any
    right: Any


@dataclass
class Neg:
    arg: Any


@dataclass
class Discard:
    arg: Any


class RegisterFile:
    def __init__(self, count):
        self._free = [f"r{i}" for i in reversed(range(count))]

    def alloc_reg(self):
        return self._free.pop()

    def free_reg(self, reg):
        self._free.append(reg)


class Emitter:
    def __init__(self, regs):
        self.regs = regs
        self.code = []

    def visit(self, node):
        method = getattr(self, "visit_" + type(node).__name__.lower())
        return method(node)  # clean: handed to the caller

    def visit_const(self, node):
        reg = self.regs.alloc_reg()  # clean: the result register goes to the caller
        self.code.append(f"mov {reg}, {node.value}")
        return reg

    def visit_load(self, node):
        reg = self.regs.alloc_reg()  # clean: the result register goes to the caller
        self.code.append(f"ld {reg}, {node.symbol}")
        return reg

    def visit_add(self, node):
        left = self.visit(node.left)  # clean: it becomes the result
        right = self.visit(node.right)  # clean: freed after the add
        self.code.append(f"add {left}, {left}, {right}")
        self.regs.free_reg(right)
        return left

    def visit_neg(self, node):
        arg = self.visit(node.arg)  # leak: the result is another register, arg is not freed
        out = self.regs.alloc_reg()  # clean: the result register goes to the caller
        self.code.append(f"neg {out}, {arg}")
        return out

    def visit_discard(self, node):
        self.visit(node.arg)  # leak: the register of the value is dropped
        self.code.append("nop")
        return None


def compile_statement(node, regs):
    emitter = Emitter(regs)
    reg = emitter.visit(node)  # clean: freed unless the statement gave none
    if reg is not None:
        emitter.code.append(f"out {reg}")
        regs.free_reg(reg)
    return emitter.code
