"""One class after the other: what it takes to give it the mixin, done on the drafts of its files."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from auditor.adopt import constructor, inheritance
from auditor.adopt.documentation import documented
from auditor.adopt.draft import Draft, Refused
from auditor.adopt.helpers import unlent, unready
from auditor.adopt.lending import lent, with_lender
from auditor.adopt.obstacles import refuse_strange
from auditor.adopt.pooling import pooled
from auditor.adopt.project import Key, Project, has_mixin, key_of
from auditor.adopt.temporaries import Kept, Temporary, judged
from auditor.source.entries import ClassIndex

_PLAIN_BASES = frozenset(("torch.nn.Module", "torch.nn.modules.Module", "torch.nn.modules.module.Module"))
_MIXED_IN = frozenset(("ABC", "Generic", "Protocol"))
_CLEANUPS = frozenset(("close", "cleanup", "shutdown", "teardown"))
_MOST = 200  # rewritings of one class, against an endless loop


class Fate(StrEnum):
    ADOPTED = "adopted"
    ALREADY = "already adopted"
    REFUSED = "refused"


@dataclass
class Outcome:
    """What became of one class. `edits` names every edited place; `kept` is what stays plain torch."""

    entry: ClassIndex
    fate: Fate
    edits: list[str] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reason: str = ""
    paths: tuple[str, ...] = ()


class Adopter:
    """Adopts classes of one project. `import_from(path)` is the module that a file takes the mixin from."""

    def __init__(self, project: Project, import_from: Callable[[str], str]) -> None:
        self.project = project
        self._import_from = import_from
        self.outcomes: dict[Key, Outcome] = {}
        self._wanting: dict[Key, bool] = {}

    def adopt(self, entry: ClassIndex, *, named: bool = True) -> Outcome:
        """Adopt a class: bases that make its temporaries first, then the modules it builds, then itself."""
        known = self.outcomes.get(key_of(entry))
        if known is not None:
            return known
        self.outcomes[key_of(entry)] = Outcome(entry, Fate.ALREADY)  # what builds itself is met again here
        for relative in self._relatives(entry):
            if self._wants(relative):
                self.adopt(relative, named=False)
        outcome = self._outcome(entry)
        self.outcomes[key_of(entry)] = outcome
        return outcome

    def _relatives(self, entry: ClassIndex) -> list[ClassIndex]:
        try:
            children = [child for child, _, _ in self.project.children(entry)]
        except Refused:
            children = []  # the class itself says why
        return [*reversed(list(self.project.table.ancestors(entry))), *children]

    def _wants(self, entry: ClassIndex) -> bool:
        """Whether a module makes a temporary that may be pooled, or builds one that does."""
        key = key_of(entry)
        if key not in self._wanting:
            self._wanting[key] = False  # in a circle the others decide
            self._wanting[key] = self.project.is_module(entry) and self._has_work(entry)
        return self._wanting[key]

    def _has_work(self, entry: ClassIndex) -> bool:
        try:
            draft = self._draft(entry)
            if any(isinstance(each, Temporary) for each in self._judged(draft, entry)):
                return True
            if unlent(draft, draft.class_named(entry.qualname)):
                return True
            return any(self._wants(child) for child, _, _ in self.project.children(entry))
        except Refused:
            return False

    def _outcome(self, entry: ClassIndex) -> Outcome:
        outcome = Outcome(entry, Fate.ADOPTED)
        before = dict(self.project.drafts)
        try:
            if not self.project.is_module(entry):
                raise Refused("it is no nn.Module")
            refuse_strange(self._draft(entry), entry, self.project)
            self._rewrite(entry, outcome)
        except Refused as refusal:
            self.project.drafts = before
            outcome.kept = outcome.kept or self._kept(entry)
            outcome.fate, outcome.edits, outcome.reason = Fate.REFUSED, [], str(refusal)
            return outcome
        outcome.kept = self._kept(entry)
        if not outcome.edits:
            outcome.fate = Fate.ALREADY
        changed = [path for path, draft in self.project.drafts.items() if before.get(path) is not draft]
        related = [other.paths for other in self.outcomes.values() if self._belongs(other.entry, entry)]
        outcome.paths = tuple(dict.fromkeys([*changed, *(path for paths in related for path in paths)]))
        return outcome

    def _belongs(self, other: ClassIndex, entry: ClassIndex) -> bool:
        """Whether what was done to `other` was done for `entry`."""
        relatives = {key_of(each) for each in self._relatives(entry)}
        return key_of(other) in relatives and self.outcomes[key_of(other)].fate is Fate.ADOPTED

    def _rewrite(self, entry: ClassIndex, outcome: Outcome) -> None:
        """Every step, each on the draft that the one before left. What is there already is no step."""
        pooled_before = any(map(has_mixin, self.project.lineage(entry)))
        if not (pooled_before or self._inherits(entry) or self._wants(entry)):
            raise Refused("nothing that it makes may be pooled")
        steps = _Steps(self.project, entry, outcome)
        self._lease(steps, entry)
        self._lend(steps, entry)
        inherits = self._inherits(entry)
        node = steps.node
        if constructor.constructor_of(node) is not None:
            steps.do("parameters", constructor.with_parameters(steps.draft, entry.qualname))
            if inherits and not has_mixin(entry):
                steps.do("switch handed to the base", constructor.handed_to_base(steps.draft, entry.qualname))
            else:
                steps.do("initialisation", constructor.initialised(steps.draft, entry.qualname))
        elif not inherits and not has_mixin(entry):
            plain = self._plain_base(entry)
            steps.do("constructor", constructor.created(steps.draft, entry.qualname, plain_base=plain))
        self._hand_on(steps, entry, outcome)
        if steps.changed:
            steps.do("docstring", documented(steps.draft, entry.qualname))
            steps.do("cleanup", _cleaned_up(steps.draft, entry.qualname))
        if not inherits and not has_mixin(entry):
            steps.do("base class", inheritance.based(steps.draft, entry.qualname))
            path = entry.span.path
            steps.do("import", inheritance.imported(steps.draft, self._import_from(path)))

    def _lease(self, steps: "_Steps", entry: ClassIndex) -> None:
        """The last temporary first: what is made before it then holds the `with` that it has become."""
        for _ in range(_MOST):
            found = [each for each in self._judged(steps.draft, entry) if isinstance(each, Temporary)]
            if not found:
                return
            last = found[-1]
            steps.do(f"lease for {last.made_by} in line {last.call.lineno}", pooled(steps.draft, last))

    def _lend(self, steps: "_Steps", entry: ClassIndex) -> None:
        """The pool to the functions beside the class that lease from it."""
        for helper in unready(steps.draft, steps.node):
            [same] = [each for each in unready(steps.draft, steps.node) if each.name == helper.name]
            steps.do(f"parameter of {helper.name}", with_lender(steps.draft, same))
            steps.do("import", inheritance.imported(steps.draft, self._import_from(entry.span.path)))
        for _ in range(_MOST):
            calls = unlent(steps.draft, steps.node)
            if not calls:
                return
            steps.do(f"pool lent to {calls[0].helper.name}", lent(steps.draft, calls[0]))

    def _hand_on(self, steps: "_Steps", entry: ClassIndex, outcome: Outcome) -> None:
        refused: set[str] = set()
        for _ in range(_MOST):
            open_calls = [
                (child, method, call)
                for child, method, call in self.project.children(entry)
                if self._is_pooled(child) and child.name not in refused and not _is_handed(call)
            ]
            if not open_calls:
                return
            child, method, call = open_calls[0]
            try:
                draft = constructor.with_arguments(steps.draft, call, of_self=method != "__init__")
            except Refused as refusal:
                refused.add(child.name)
                outcome.notes.append(f"`{child.name}` is not handed the switch: {refusal}")
                continue
            steps.do(f"switch handed to {child.name}", draft)

    def _is_pooled(self, entry: ClassIndex) -> bool:
        """Whether the class takes the switch, by now."""
        if any(map(has_mixin, self.project.lineage(entry))):
            return True
        lineage = [self.outcomes.get(key_of(each)) for each in self.project.lineage(entry)]
        own = self.outcomes.get(key_of(entry))
        if own is not None and own.fate is Fate.REFUSED:
            return False
        if own is None and entry.has_init:
            return False
        return any(each is not None and each.fate is Fate.ADOPTED for each in lineage)

    def _inherits(self, entry: ClassIndex) -> bool:
        """Whether a base has the mixin, by now."""
        for base in self.project.table.ancestors(entry):
            outcome = self.outcomes.get(key_of(base))
            if has_mixin(base) or (outcome is not None and outcome.fate is Fate.ADOPTED):
                return True
        return False

    def _plain_base(self, entry: ClassIndex) -> bool:
        """Whether `super().__init__()` takes no arguments."""
        if any(base.has_init for base in self.project.table.ancestors(entry)):
            return False
        known = {base for each in self.project.lineage(entry) for base in each.bases}
        own = {base.qualname for base in self.project.lineage(entry)}
        return all(base in _PLAIN_BASES or base.rpartition(".")[2] in _MIXED_IN | own for base in known)

    def _judged(self, draft: Draft, entry: ClassIndex) -> Iterator[Temporary | Kept]:
        origins = self.project.origins(entry.span.path)
        yield from judged(draft, draft.class_named(entry.qualname), origins)

    def _kept(self, entry: ClassIndex) -> list[Kept]:
        try:
            return [each for each in self._judged(self._draft(entry), entry) if isinstance(each, Kept)]
        except Refused:
            return []

    def _draft(self, entry: ClassIndex) -> Draft:
        return self.project.draft(entry.span.path)


@dataclass
class _Steps:
    """The steps taken on one class; the project's draft of its file is always the latest."""

    project: Project
    entry: ClassIndex
    outcome: Outcome

    @property
    def draft(self) -> Draft:
        return self.project.draft(self.entry.span.path)

    @property
    def node(self) -> ast.ClassDef:
        return self.draft.class_named(self.entry.qualname)

    @property
    def changed(self) -> bool:
        return bool(self.outcome.edits)

    def do(self, what: str, draft: Draft) -> None:
        """Take a step; one that changed nothing was not needed."""
        if draft.lines == self.draft.lines:
            return
        assert draft.tree  # what cannot be parsed ends here, with the reason
        self.project.drafts[self.entry.span.path] = draft
        self.outcome.edits.append(what)


def _is_handed(call: ast.Call) -> bool:
    given = {word.arg for word in call.keywords}
    return constructor.SWITCH in given and constructor.THRESHOLD in given


def _cleaned_up(draft: Draft, owner: str) -> Draft:
    """The mixin's cleanup at the beginning of the class's own, if it has one."""
    for method in draft.class_named(owner).body:
        if not isinstance(method, ast.FunctionDef) or method.name not in _CLEANUPS or not method.args.args:
            continue
        if any("cleanup_memory_pool" in draft.source(each) for each in method.body):
            return draft
        first = method.body[0]
        if not draft.alone(first) or first.lineno == method.lineno:
            return draft
        is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        row = draft.end(first)[0] + 1 if is_text else draft.start(first)[0]
        indent = draft.indent(draft.start(first)[0])
        return draft.with_lines(row, [f"{indent}{method.args.args[0].arg}.cleanup_memory_pool()"])
    return draft
