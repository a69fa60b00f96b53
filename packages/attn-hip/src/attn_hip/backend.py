"""Backend ``fa2``: the in-tree kernels."""

from __future__ import annotations

from attn_core.backend import API_VERSION, AppendIO, DeviceImage, Path, PlanResult, RunIO, TensorContract
from attn_core.batch import HostBatch
from attn_core.capability import FLOATS, FP8, Capability, Dims, GraphSupport
from attn_core.problem import AttentionProblem, MaskMode, Op, PosEncoding
from attn_core.query import Query
from attn_core.reasons import Reason
from attn_core.rules import Rule
from attn_core.target import DeviceTarget

from . import codes
from .host import CANDIDATE, Host
from .launch import Launch, append, run
from .plan import plan

NAME = CANDIDATE
GPUS = ("gfx942", "gfx950", "sm_90")
"""Devices that the kernels are written for and not yet built for."""

CAPABILITY = Capability(
    archs=frozenset({"cpu", *GPUS}),
    ops=frozenset(Op),
    q_dtypes=FLOATS,
    kv_dtypes=FLOATS | FP8,
    o_dtypes=FLOATS,
    head_dims=Dims(at_most=512),
    masks=frozenset(MaskMode),
    pos_encodings=frozenset(PosEncoding),
    window=True,
    soft_cap=True,
    batch_invariant=True,
    graph=GraphSupport.ALWAYS,
)


class Fa2Backend:
    """The kernels of attn-hip on the host CPU, built on first use."""

    api_version = API_VERSION
    name = NAME
    rank = 100
    paths = (Path("tile", CAPABILITY, TensorContract(q="dense")),)
    rules: tuple[Rule, ...] = ()
    codes = codes.CODES

    def __init__(self) -> None:
        self._host = Host()

    def unavailable(self, target: DeviceTarget) -> Reason | None:
        """Say that there is no device code, or nothing to build CPU code with.

        Raises:
            ValueError: ``ATTN_CPU_ISA`` names what this CPU cannot run.
        """
        if target.kind != "cpu":
            return Reason(codes.DEVICE, NAME, target.arch)
        return self._host.unavailable()

    def prepare(self, target: DeviceTarget, problem: AttentionProblem, path: str) -> Reason | None:
        """Load the native module; the first time on a machine this compiles it."""
        return self._host.prepare()

    def plan(self, query: Query, path: str, batch: HostBatch) -> PlanResult:
        """Cut the batch into work items, in native code."""
        return plan(self._host.module(), query, batch)

    def run(self, launch: object, image: DeviceImage, io: RunIO) -> None:
        """Compute on torch's number of threads."""
        assert isinstance(launch, Launch)
        run(launch, image, io)

    def append(self, path: str, problem: AttentionProblem, io: AppendIO) -> None:
        """Write the rows into their slots."""
        append(self._host.module(), f"{NAME}/{path}", problem, io)

    def doctor(self) -> dict[str, object]:
        """Return instruction set, compiler, cache and build."""
        return self._host.state()
