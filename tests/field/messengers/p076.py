"""Test beds reserved through generator fixtures and a small runner."""


class BedPool:
    def __init__(self, beds):
        self._ready = list(beds)

    def reserve_bed(self):
        return self._ready.pop()

    def free_bed(self, bed):
        bed.wipe()
        self._ready.append(bed)


def bed_fixture(pool):
    bed = pool.reserve_bed()  # clean: freed when the runner resumes the generator
    bed.boot()
    yield bed
    pool.free_bed(bed)


class Runner:
    def __init__(self, pool):
        self.pool = pool
        self.passed = 0
        self.failed = []

    def run(self, test):
        fixture = bed_fixture(self.pool)  # clean: resumed after the test
        bed = next(fixture)
        if test(bed):
            self.passed += 1
        else:
            self.failed.append(test.__name__)
        next(fixture, None)

    def run_bare(self, test):
        bed = self.pool.reserve_bed()  # leak: a dead bed is noted and not freed
        if not bed.alive():
            self.failed.append(test.__name__)
            return False
        ok = test(bed)
        self.pool.free_bed(bed)
        return ok

    def run_until_failure(self, tests):
        for test in tests:
            fixture = bed_fixture(self.pool)  # leak: a failure returns before the resume
            if not test(next(fixture)):
                self.failed.append(test.__name__)
                return False
            self.passed += 1
            next(fixture, None)
        return True

    def run_group(self, tests):
        fixture = bed_fixture(self.pool)  # clean: the for loop over it runs to the end
        for bed in fixture:
            self.passed += sum(1 for test in tests if test(bed))

    def inspect(self):
        bed = self.pool.reserve_bed()  # clean: freed
        report = bed.report()
        self.pool.free_bed(bed)
        return report
