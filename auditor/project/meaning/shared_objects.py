"""What a call does to a lease of an object that its callee reaches itself: `def end(): STOCK.put_back()`."""

from dataclasses import dataclass

from auditor.flow.effects import BORROWED, RELEASED, Fate, Treatment, Value
from auditor.ir.ops import Call, Path
from auditor.project.code.modules import Function
from auditor.project.meaning.needs import Question
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.summaries import Summaries


@dataclass(frozen=True, slots=True)
class SharedObjects:
    """Answers for the calls of one function."""

    function: Function
    recogniser: Recogniser
    summaries: Summaries

    def treatment(self, call: Call, place: Path, value: Value, protocol: str) -> Treatment:
        """Names mean the same in functions of the same module alone."""
        targets, constructed, _ = self.recogniser.calls.targets(self.function, call.at)
        if constructed is not None or self._is_local(place):
            return BORROWED
        near = (target for target in targets if target.module is self.function.module)
        answers = (self.summaries.answer(Question(target, place, value, protocol)) for target in near)
        return RELEASED if any(answer.fate in (Fate.RELEASE, Fate.TAKE) for answer in answers) else BORROWED

    def _is_local(self, place: Path) -> bool:
        """Of a function around this one."""
        name, around = place[0][1:], self.function.parent
        return around is not None and name.isidentifier() and name not in self.function.module.assigned
