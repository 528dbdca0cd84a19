# take: P.book()
# give: P.unbook(X.index)
# gets: optional
# type: PipelineStages
import dataclasses


@dataclasses.dataclass
class Microbatch:
    index: int
    busy: bool = False
    times_used: int = 0


class PipelineStages:
    """In-flight microbatches of the pipeline-parallel loop; round robin over `depth` records."""

    def __init__(self, depth: int):
        self.records = [Microbatch(i) for i in range(depth)]
        self._cursor = 0

    def book(self):
        for step in range(len(self.records)):
            rec = self.records[(self._cursor + step) % len(self.records)]
            if not rec.busy:
                rec.busy = True
                rec.times_used += 1
                self._cursor = rec.index + 1
                return rec
        return None

    def unbook(self, index: int):
        rec = self.records[index]
        if not rec.busy:
            raise AssertionError("microbatch %d wasn't booked" % index)
        rec.busy = False
