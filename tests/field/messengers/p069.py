"""Parallel mesh refinement: leases come back in the results of futures."""
from concurrent.futures import ThreadPoolExecutor, as_completed


class PatchPool:
    def __init__(self, count, cells):
        self._blank = [[0.0] * cells for _ in range(count)]

    def fetch_patch(self):
        return self._blank.pop()

    def blank_patch(self, patch):
        patch[:] = [0.0] * len(patch)
        self._blank.append(patch)


def refine(patches, solver, region):
    patch = patches.fetch_patch()  # clean: handed on as the result of the task
    solver.refine(region, patch)
    return patch


def residual(patches, solver, region):
    patch = patches.fetch_patch()  # clean: blanked inside the task
    solver.refine(region, patch)
    value = max(map(abs, patch))
    patches.blank_patch(patch)
    return value


class Refiner:
    def __init__(self, patches, solver, workers):
        self.patches = patches
        self.solver = solver
        self.pool = ThreadPoolExecutor(workers)
        self.energy = 0.0

    def sweep(self, regions):
        jobs = [self.pool.submit(refine, self.patches, self.solver, r) for r in regions]  # clean: blanked
        for job in as_completed(jobs):
            patch = job.result()
            self.energy += sum(patch)
            self.patches.blank_patch(patch)

    def sweep_until(self, regions, limit):
        jobs = [self.pool.submit(refine, self.patches, self.solver, r) for r in regions]  # leak: early return
        for job in as_completed(jobs):
            patch = job.result()
            self.energy += sum(patch)
            if self.energy > limit:
                return False
            self.patches.blank_patch(patch)
        return True

    def residuals(self, regions):
        jobs = [self.pool.submit(residual, self.patches, self.solver, r) for r in regions]
        return [job.result() for job in jobs]

    def refine_here(self, region):
        patch = refine(self.patches, self.solver, region)  # clean: blanked after the sum
        energy = sum(patch)
        self.patches.blank_patch(patch)
        return energy

    def peak(self, region):
        return max(refine(self.patches, self.solver, region))  # leak: the peak is kept, the patch not blanked
