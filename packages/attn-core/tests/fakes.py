"""Backends that do what a test tells them to, and the registry they live in."""

from attn_core import plugins
from attn_core.backend import API_VERSION, Path, PlanResult, TensorContract
from attn_core.capability import Capability, GraphSupport
from attn_core.problem import MaskMode, Op, PosEncoding
from attn_core.reasons import Code, Stage
from attn_core.reference import ReferenceBackend
from attn_core.rules import Rule

SLOW = Code("fake.slow", Stage.PREFERENCE, "is slow up to {limit} rows")
WRONG = Code("fake.wrong", Stage.CAPABILITY, "is wrong above {limit} rows")
ABSENT = Code("fake.absent", Stage.AVAILABILITY, "needs {limit}")
BUILD = Code("fake.build", Stage.PREPARE, "needs a build of {limit}")

EVERYTHING = Capability(
    archs=None,
    ops=frozenset(Op) - {Op.APPEND},
    masks=frozenset(MaskMode),
    pos_encodings=frozenset(PosEncoding),
    window=True,
    soft_cap=True,
    batch_invariant=True,
    graph=GraphSupport.ALWAYS,
)


class FakeBackend:
    """A backend that does what the test tells it to, and says what was asked of it.

    Args:
        name: Backend name.
        paths: Path names, or (name, capability) pairs.
        rank: Place under ``auto``.
        rules: Rules.
        contract: Of every path.
        value: What run() writes into out.
        **does: ``unavailable``, ``prepare``, ``plan`` or ``run``: a function to call instead, or a value
            to return, or an exception to raise.
    """

    api_version = API_VERSION

    def __init__(self, name="fake", *, paths=("p",), rank=10, rules=(), contract=None, value=1.0, **does):
        pairs = [(p, EVERYTHING) if isinstance(p, str) else p for p in paths]
        contract = TensorContract() if contract is None else contract
        self.name, self.rank, self.rules = name, rank, tuple(rules)
        self.paths = tuple(Path(p, capability, contract) for p, capability in pairs)
        self.value, self.does, self.calls = value, does, []

    def _do(self, what, default, *args):
        self.calls.append((what, *(a for a in args if isinstance(a, str))))
        do = self.does.get(what, default)
        if isinstance(do, BaseException):
            raise do
        return do(*args) if callable(do) else do

    def unavailable(self, target):
        return self._do("unavailable", None, target)

    def prepare(self, target, problem, path):
        return self._do("prepare", None, target, problem, path)

    def plan(self, query, path, batch):
        return self._do("plan", PlanResult(("launch", path)), query, path, batch)

    def run(self, launch, image, io):
        self._do("run", self._fill, launch, image, io)

    def _fill(self, launch, image, io):
        io.out.fill_(self.value)
        if io.lse is not None:
            io.lse.fill_(self.value)

    def count(self, what):
        return sum(call[0] == what for call in self.calls)


def registry(*backends, reference=True):
    """A Registry of these backends, with the reference last."""
    return plugins.Registry((*backends, *([ReferenceBackend()] if reference else [])), (), (), {})


def rule(code, test, paths=("p",), ops=frozenset(Op)):
    """A rule of a fake: ``test(query)`` gives (limit, got) or None."""
    return Rule(code, ops, frozenset(paths), test)


def slugs(reasons):
    """Who was refused for what."""
    return [(reason.candidate, reason.code.slug) for reason in reasons]
