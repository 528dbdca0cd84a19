"""Warm interpreters of a notebook server; a table maps verbs to actions."""
import operator


class Interpreters:
    def __init__(self, kernels):
        self._warm = list(kernels)

    def adopt(self):
        return self._warm.pop() if self._warm else None

    def retire(self, kernel):
        kernel.reset()
        self._warm.append(kernel)


class Notebook:
    def __init__(self, interpreters):
        self.interpreters = interpreters
        self.kernel = None
        self.outputs = []
        self.verbs = {
            "keep": self._keep,
            "once": self._once,
            "show": self._show,
        }

    def _keep(self, kernel, code):
        if self.kernel is not None:
            self.interpreters.retire(self.kernel)
        self.kernel = kernel
        self.outputs.append(kernel.run(code))

    def _once(self, kernel, code):
        self.outputs.append(kernel.run(code))
        self.interpreters.retire(kernel)

    def _show(self, kernel, code):
        self.outputs.append(kernel.format(code))

    def fresh(self, seed):
        kernel = self.interpreters.adopt()  # clean: handed to the caller
        if kernel is not None:
            kernel.run(f"import random; random.seed({seed})")
        return kernel

    def run_kept(self, code):
        kernel = self.fresh(1)  # clean: the verb keeps it
        if kernel is None:
            return False
        self.verbs["keep"](kernel, code)
        return True

    def run_cells(self, cells):
        for seed, code in enumerate(cells):
            kernel = self.fresh(seed)  # clean: retired by the verb in each round
            if kernel is None:
                break
            self.verbs["once"](kernel, code)
        return len(self.outputs)

    def pretty(self, code):
        kernel = self.fresh(0)  # leak: the verb show only formats
        if kernel is None:
            return code
        self.verbs["show"](kernel, code)
        return self.outputs[-1]

    def same(self, left, right):
        a = self.fresh(0)  # clean: retired on both ways
        if a is None:
            return False
        b = self.fresh(0)  # leak: unequal results return with the second kernel
        if b is None:
            self.interpreters.retire(a)
            return False
        equal = operator.eq(a.run(left), b.run(right))
        self.interpreters.retire(a)
        if not equal:
            return False
        self.interpreters.retire(b)
        return True
