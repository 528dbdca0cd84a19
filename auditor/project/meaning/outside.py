"""What calls do that lead out of the project: tables of the library and of tensors decide, then the name."""

import ast
from dataclasses import replace

from auditor.flow.effects import (
    BORROWED,
    PERHAPS_SAME,
    RELEASED,
    SAME,
    TAKEN,
    UNKNOWN,
    Acquisition,
    Position,
    Treatment,
    Value,
)
from auditor.flow.indirect import SPELT, WITHIN
from auditor.ir.ops import ANY_ITEM, Call, Path, is_temporary
from auditor.project.code.bindings import is_dropped
from auditor.project.code.lookups import gives_a_key, looked_up_before, strikes_off_another
from auditor.project.code.modules import Function, last_part
from auditor.project.meaning import library
from auditor.project.meaning.absorbed import is_absorbed
from auditor.project.meaning.answering import answers_as_a_borrower
from auditor.project.meaning.ended_as_keys import ends_its_keys
from auditor.project.meaning.ended_through import is_ended_through, is_named_to_an_end
from auditor.project.meaning.entered import owed_behind_its_with
from auditor.project.meaning.outside_words import (
    ARRAYS,
    ASKING,
    CONTENT,
    COPYING,
    DIGESTS,
    EXPORTING,
    HOLDING,
    ITSELF,
    LOOKING_UP,
    MEMORY,
    NUMBERED,
    ON_STREAMS,
    READING,
    RUNNING,
    USING,
    WAITING,
    carried,
    converts,
    makes,
    of_a_tensor,
    of_numbers,
    writes_out,
)
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.source import Source
from auditor.project.meaning.tables_of_memory import is_table_of_memory
from auditor.protocols.tensor_operations import treatment_of
from auditor.protocols.vocabulary import KEEPING, REMOVING, STORING


class OutsideEffects:
    """Answers for calls of one function that no function of the project is known to receive."""

    def __init__(self, function: Function, recogniser: Recogniser) -> None:
        self.function = function
        self.recogniser = recogniser
        self._receivers: frozenset[Path] | None = None
        self._statements: set[int] | None = None

    def acquisition(self, call: Call, source: Source | None = None) -> Acquisition | None:
        """The lease that a call starts, or another one that lies in its result."""
        return self.recogniser.acquisition(self.function, call, source)

    def ends_itself(self, protocol: str) -> bool:
        return protocol in self.recogniser.ending_themselves

    def telling(self, protocol: str) -> frozenset[str]:
        return self.recogniser.telling(protocol, memory=False)

    def lends_plain_memory(self, protocol: str) -> bool:
        return self.recogniser.lends_plain_memory(protocol)

    def end_alike(self, one: str, other: str) -> bool:
        """`pool.unref(page)` ends what `pool.ref(page)` counts, and what `pool.take()` lends; the end of
        `bus.take_turn()` does not end what `registry.attach()` has counted."""
        ends = self.recogniser.ending_names(one), self.recogniser.ending_names(other)
        return not all(ends) or not ends[0].isdisjoint(ends[1])

    def is_ended_through(self, field: str, protocol: str) -> bool:
        return is_ended_through(self.recogniser, field, protocol)

    def is_named_to_an_end(self, field: str, protocol: str) -> bool:
        return is_named_to_an_end(self.recogniser, field, protocol)

    def ends_its_keys(self, field: str, protocol: str) -> bool:
        return ends_its_keys(self.recogniser, field, protocol)

    def is_absorbed(self, added: ast.AST, protocol: str) -> bool:
        return is_absorbed(self.recogniser, self.function, added, protocol)

    def is_memory(self, table: ast.AST) -> bool:
        if not isinstance(table, ast.Subscript):
            return False
        model = self.recogniser.calls.model
        held = model.type_of(self.function, table.value)
        if isinstance(held, str):
            return held in MEMORY
        return is_table_of_memory(model, self.function, table)

    def owed_behind_its_with(self, context: ast.AST, inside: Path, value: Value, protocol: str) -> bool:
        return owed_behind_its_with(self.recogniser, protocol)

    def never_runs(self, node: ast.Call) -> bool:
        """`pool.release(line)` of an `async def`, a statement without `await`: the coroutine is dropped."""
        if self._statements is None:
            bare = (each for each in self.function.statements if isinstance(each, ast.Expr))
            self._statements = {id(each.value) for each in bare}
        if id(node) not in self._statements:
            return False
        calls = self.recogniser.calls
        targets, constructed, _ = calls.targets(self.function, node)
        if constructed is not None or not targets or calls.guessed(self.function, node):
            return False
        return all(isinstance(each.node, ast.AsyncFunctionDef) and not each.decorators for each in targets)

    def _where_kept(self, call: Call) -> Call:
        """`self.rows.setdefault(key, []).append(row)`: a list in that table."""
        asked = getattr(call.at.func, "value", None) if call.method in library.APPENDING else None
        if isinstance(asked, ast.Call) and last_part(asked.func) == "setdefault":
            for op in self.function.graph.ops:
                if isinstance(op, Call) and op.at is asked and op.receiver:
                    return replace(call, receiver=(*op.receiver, ANY_ITEM))
        return call

    def outside(
        self, call: Call, dotted: str | None, position: Position, rest: Path, value: Value
    ) -> Treatment:
        """What such a call does to an operand; `dotted` is its full name where that is known."""
        if value is Value.INDEX and call.receiver is None and position == 0 and not rest:
            if call.method == "str":
                return Treatment(result=(SPELT,), maybe=True)
            told = call.args[0][0] if call.args else ()
            if call.method == "int" and (len(told) == 1 or (told and is_temporary(told))):
                return SAME  # `number = int(slot)`, `number = int(pool.allocate(1)[0])`
        if dotted == "numpy.copy" and value is Value.TENSOR:
            return BORROWED
        if position == 0 and value is Value.OBJECT and self._only_looks_up(call):
            return BORROWED
        if position == 0 and value is Value.OBJECT and _joins_text(call.at.func):
            return BORROWED
        if position != -1 and dotted is None and answers_as_a_borrower(self.recogniser, self.function, call):
            return UNKNOWN
        if call.method == "next" and gives_a_key(self.function, call.at):
            return BORROWED
        if position != -1 and call.method == "update" and self._is_of_a_digest(call.at.func):
            return BORROWED
        if position == -1 and not rest and value is Value.INDEX and library.empties(call):
            return Treatment(leaves=True)  # numbers have no `clear()`: it is their list
        for found in (
            self._of_container(call, position, rest),
            library.heap(call, position, rest, answered=self._is_asked_for(call)),
            library.made_anew(call, position, rest),
            None if self._is_missing(call) else library.default(call, position, rest),
            None
            if of_numbers(dotted) or self._is_a_kept_function(call)
            else library.stored_by_method(self._where_kept(call), position, rest),
            library.function(call, position, rest)
            if call.receiver is None
            or dotted is not None
            or call.method in (library.GIVING_BACK | library.CHAINING - WAITING) | library.PASSED_ON
            else None,
        ):
            if found is not None:
                return found
        if dotted is not None and value is Value.OBJECT and (over := library.through(dotted, position, rest)):
            return over
        if dotted is not None and (found := library.of_paths(dotted, position, rest)) is not None:
            if position == 0 and call.method == "join":
                unnamed = is_temporary(call.args[0][0])  # `join(mkdtemp(), "log")` is all that is left of it
                return PERHAPS_SAME if unnamed else Treatment(result=(WITHIN,), maybe=True)
            return found
        return self._by_its_name(call, dotted, position, rest, value)

    def _by_its_name(
        self, call: Call, dotted: str | None, position: Position, rest: Path, value: Value
    ) -> Treatment:
        """Of a function in no table, what it is called says most."""
        if self.recogniser.releases_by_name(call.at, position, value):
            return RELEASED
        if position == 0 and value is Value.INDEX and REMOVING.fullmatch(call.method):
            return RELEASED
        if position == -1:
            return self._own_method(call, rest, value)
        if position == "fileno" and call.method.lower().endswith("socket"):
            return TAKEN  # `socket.socket(fileno=other.detach())`: the new object closes it
        to_base = call.method == "__init__" and not (rest and self._is_own(call, position))
        if position in library.KEYWORDS_TAKEN or to_base:
            return TAKEN  # `Base.__init__(self, sock)`: the object keeps it where its base puts it
        if call.method in COPYING and call.receiver is not None and value is Value.OBJECT:
            return BORROWED  # `output.copy(region)` reads the region
        if self._copies_what_lies_there(call, dotted, value):
            return BORROWED
        if dotted is None and any(name == "out" for name, _ in call.kwargs):
            return BORROWED  # `model.scale(raw, 0.5, out=scaled)` works with what it is given
        if call.method in LOOKING_UP and call.receiver is not None:
            return BORROWED  # `table.pop(key)`: what is looked up by it goes, it stays
        if call.method == "open" and call.receiver is None and value is Value.OBJECT:
            return BORROWED  # what is opened is a path, or a number: no file
        if call.method == "run_in_executor" and position == 0:  # it runs the work, it is not the work
            return BORROWED
        if writes_out(call.method, dotted, value is Value.OBJECT) or call.method in ON_STREAMS:
            return BORROWED
        if call.method in RUNNING and call.receiver is not None and position and value is not Value.OBJECT:
            return UNKNOWN  # what is run is not known, so neither is whether it gives back what it works with
        computes = of_numbers(dotted) and treatment_of(call.method) is not None  # `torch.add(a, b, out=a)`
        if not computes and (call.method in STORING or KEEPING.match(call.method)):
            sent = dotted is None and call.method in STORING and not KEEPING.match(call.method)
            return UNKNOWN if sent else TAKEN  # `client.store(x)` may only send it
        if call.method in library.BORROWING or library.given_to_a_child(call, position):
            return BORROWED
        return self._unknown_function(call, dotted, position, rest, value)

    def _of_container(self, call: Call, position: Position, rest: Path) -> Treatment | None:
        """A lookup may find another entry, where the function strikes off by another key as well."""
        found = library.container_method(call, position, rest)
        if found is not None and call.method == "get" and rest[:1] == (ANY_ITEM,):
            return replace(found, split=strikes_off_another(self.function, call.at))
        return found

    def _is_asked_for(self, call: Call) -> bool:
        return call.method in library.EXCHANGING and not is_dropped(self.function, call.at)

    def _copies_what_lies_there(self, call: Call, dotted: str | None, value: Value) -> bool:
        """`self.copy(old_block, new_block)`: its answer is no number, as that of `xp.copy(numbers)` is."""
        of_object = call.receiver is not None and dotted is None and value is Value.INDEX
        return of_object and call.method in COPYING and len(call.args) > 1

    def _is_of_a_digest(self, method: ast.expr) -> bool:
        """`state.update(memory)`, where the same is asked for its `hexdigest()`: no table is."""
        of = ast.unparse(method).rpartition(".")[0]
        return bool(of) and any(f"{of}.{way}(" in self.function.module.text for way in DIGESTS)

    def _only_looks_up(self, call: Call) -> bool:
        """`rows.setdefault(key, {})`; a pool may note so for whom it has taken something."""
        lends = self.function in self.recogniser.acquiring
        return call.method == "setdefault" and len(call.args) > 1 and not lends

    def _is_missing(self, call: Call) -> bool:
        """`if key not in table: table.setdefault(key, pool.allocate())`: somebody has asked before."""
        return call.method == "setdefault" and looked_up_before(self.function, call.at)

    def _own_method(self, call: Call, rest: Path, value: Value) -> Treatment:
        """A method of the lease itself, or of an object that holds it."""
        if call.receiver is None:
            return BORROWED
        if call.method in ("__exit__", "__aexit__", "aclose"):
            return RELEASED
        if call.method == "pop_all":
            return Treatment(result=(), leaves=True)  # of a stack of contexts
        if call.method == "start" and rest and not self._own_object(call):
            return TAKEN  # a thread or process that was made with the lease
        if rest:
            told = call.method in READING or ASKING.fullmatch(call.method)
            return BORROWED if told else PERHAPS_SAME
        table = treatment_of(call.method)
        if value is Value.INDEX:
            return carried(call.method, table)
        if value is Value.TENSOR and converts(call):
            return BORROWED  # no other than `buffer.half()`
        if value is Value.TENSOR:
            return table if table is not None else PERHAPS_SAME
        if call.method in CONTENT and not (call.args or call.kwargs):
            return SAME
        return SAME if table == SAME or call.method in ITSELF else BORROWED

    def _is_own(self, call: Call, position: Position) -> bool:
        """The object itself is the argument."""
        given = call.args[position][0] if isinstance(position, int) and position < len(call.args) else ()
        return given == (self.function.owner,)

    def _is_a_kept_function(self, call: Call) -> bool:
        """`self.put(part)` of a class without a base, and without such a method: what it was told to call."""
        cls = self.function.cls
        return cls is not None and not cls.node.bases and self._own_object(call)

    def _own_object(self, call: Call) -> bool:
        """`self.start()`: what the object holds stays a field of this class."""
        return call.receiver is not None and call.receiver == (self.function.owner,)

    def _unknown_function(
        self, call: Call, dotted: str | None, position: Position, rest: Path, value: Value
    ) -> Treatment:
        if value is Value.AMOUNT:
            return BORROWED
        known_torch = of_numbers(dotted)
        new = makes(call.method)
        of_pool = call.receiver in self._pools() and not self._own_object(call)
        if call.receiver is not None and of_pool and not new:
            return BORROWED  # the pool's own method, and none that its protocol lists
        table = treatment_of(call.method)
        if value is Value.INDEX and call.method == "copy_" and call.receiver is not None:
            return Treatment(moved_to=call.receiver)
        if value is Value.INDEX and table is not None:
            return carried(call.method, table)
        if position == "out":
            return SAME
        if value is Value.OBJECT and known_torch and call.method in ARRAYS:
            return SAME  # only numbers can be put into a tensor: what was handed out were numbers
        if table is not None and (known_torch or (value is Value.TENSOR and not new)):
            as_function = call.receiver is None or (dotted is not None and not of_a_tensor(call.at, dotted))
            return table if position == 0 and as_function else BORROWED
        if new:
            kept = not known_torch or call.method in HOLDING
            return Treatment(result=(ANY_ITEM, *rest)) if kept else BORROWED
        if value is Value.TENSOR and not rest:
            return BORROWED if known_torch or self._is_module_call(call) else PERHAPS_SAME
        if value is Value.INDEX and not known_torch:
            uses = USING.match(call.method) or (dotted is not None and dotted.split(".")[0] in NUMBERED)
            return BORROWED if uses and not self._written_there(call, position) else UNKNOWN
        if value is Value.INDEX:
            return PERHAPS_SAME
        if USING.match(call.method) or (call.receiver is not None and EXPORTING.fullmatch(call.method)):
            return BORROWED
        return BORROWED if dotted is not None else UNKNOWN  # a function of a library, known by name, borrows

    def _written_there(self, call: Call, position: Position) -> bool:
        """`rows.write((row, at), pool.alloc(4))`: numbers that nobody else knows are what is written."""
        if not isinstance(position, int) or not 0 < position < len(call.args) or call.receiver is None:
            return False
        return call.method == "write" and is_temporary(call.args[position][0])

    def _pools(self) -> frozenset[Path]:
        """Receivers of this function's acquires; of `self` all methods are known, and the rest are fields."""
        if self._receivers is None:
            self._receivers = frozenset()
            self._receivers = frozenset(
                op.receiver
                for op in self.function.graph.ops
                if isinstance(op, Call) and op.receiver is not None and self.acquisition(op) is not None
            ) - {(self.function.owner,)}
        return self._receivers

    def _is_module_call(self, call: Call) -> bool:
        """`self.proj(x)`: an nn.Module from elsewhere makes a new tensor."""
        owner = call.at.func
        if not isinstance(owner, ast.Attribute | ast.Name):
            return False
        held = self.recogniser.calls.model.type_of(self.function, owner)
        return isinstance(held, str) and ".nn." in held


def _joins_text(function: ast.expr) -> bool:
    """`b"".join(views)` copies what they show, and `", ".join(names)` spells it."""
    match function:
        case ast.Attribute(value=ast.Constant(value=str() | bytes()), attr="join"):
            return True
    return False
