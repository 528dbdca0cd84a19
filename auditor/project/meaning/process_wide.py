"""What a call does to a state of the whole process: it ends it, or is handed a function that will."""

import ast
from collections.abc import Callable
from dataclasses import dataclass

from auditor.flow.effects import BORROWED, RELEASED, RELEASED_LATER, Fate, Treatment, Value
from auditor.flow.operands import PROCESS_POSITION
from auditor.ir.ops import Call
from auditor.project.code.modules import Function
from auditor.project.code.put_off import never_run
from auditor.project.meaning.needs import Question
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.summaries import PROCESS, Summaries


@dataclass(frozen=True, slots=True)
class ProcessWide:
    """Answers for the calls of one function."""

    function: Function
    recogniser: Recogniser
    summaries: Summaries
    function_of: Callable[[ast.Lambda], Function]

    def treatment(self, call: Call, value: Value, protocol: str) -> Treatment:
        """`profiler.stop()`, here or in a callee; `stack.callback(profiler.stop)`, `atexit.register(...)`."""
        if self._ends(call.at, value, protocol):
            return RELEASED
        if never_run(self.function, call):
            return BORROWED
        given = (*call.at.args, *(keyword.value for keyword in call.at.keywords))
        return RELEASED_LATER if any(self._will_end(each, value, protocol) for each in given) else BORROWED

    def _ends(self, call: ast.Call, value: Value, protocol: str) -> bool:
        if self.recogniser.releases(self.function, call, PROCESS_POSITION, protocol):
            return True
        targets = self.recogniser.calls.targets(self.function, call)[0]
        return any(self._is_ended_by(target, value, protocol) for target in targets)

    def _is_ended_by(self, function: Function, value: Value, protocol: str) -> bool:
        answer = self.summaries.answer(Question(function, PROCESS, value, protocol))
        return answer.fate in (Fate.RELEASE, Fate.TAKE)

    def _will_end(self, given: ast.expr, value: Value, protocol: str) -> bool:
        match given:
            case ast.Lambda():
                return self._is_ended_by(self.function_of(given), value, protocol)
            case ast.Name() | ast.Attribute():
                return self._ends(ast.Call(func=given, args=[], keywords=[]), value, protocol)
        return False
