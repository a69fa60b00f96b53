"""One published plan, and the checks that hold a run to it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .arena import Image
from .backend import DeviceImage, DirectRun, RunIO, RunShapes, TensorContract
from .batch import HostBatch
from .checking import apart, dense, finite
from .errors import needs
from .frozen import FrozenShape
from .problem import PagedKV
from .query import Query
from .route import RouteDecision

Scale = float | torch.Tensor


@dataclass(slots=True)
class DirectSlot:
    """A backend's own way to run a plan.

    Attributes:
        call: The way, where there is one.
        ran: Whether the plan was run.
        asked: Whether the backend was asked for the way; the second run does.
    """

    call: DirectRun | None = None
    ran: bool = False
    asked: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PlanState:
    """Everything run() needs. Immutable; a wrapper holds one reference and plan() replaces it.

    Attributes:
        revision: 0 for a wrapper's first plan, one more with each.
        query: What was asked.
        decision: Who answers, and why not others.
        launch: The backend's launch.
        image: Index arrays on the device.
        host: The plan's own copy of those that were on the host.
        frozen: What a captured graph has baked in; None for an eager wrapper.
        q_len_per_req: Query rows per request in decode; None in prefill.
        device: Device of the run.
        workspace_bytes: Bytes of float workspace the run uses.
        q_shape: Shape q must have.
        out_shape: Shape of the output.
        kv_tail: Shape of k after its first dimension.
        v_tail: Shape of v after its first dimension.
        min_rows: Least size of the first dimension of k and v; None when only the device knows.
        q_dtype: The problem's, like the next three at hand for run().
        kv_dtype: Type of k and v.
        o_dtype: Type of out.
        contract: The chosen path's.
        direct: The backend's own way to run it.
    """

    revision: int
    query: Query
    decision: RouteDecision
    launch: object
    image: DeviceImage
    host: Image
    frozen: FrozenShape | None
    q_len_per_req: int | None
    device: torch.device
    workspace_bytes: int
    q_shape: tuple[int, int, int]
    out_shape: tuple[int, int, int]
    kv_tail: tuple[int, ...]
    v_tail: tuple[int, ...]
    min_rows: int | None
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    o_dtype: torch.dtype
    contract: TensorContract
    direct: DirectSlot = field(default_factory=DirectSlot)

    @classmethod
    def make(
        cls,
        revision: int,
        query: Query,
        decision: RouteDecision,
        launch: object,
        image: DeviceImage,
        host: Image,
        max_page_id: int | None,
        frozen: FrozenShape | None,
        q_len_per_req: int | None,
        device: torch.device,
        workspace_bytes: int,
    ) -> PlanState:
        """Derive the shapes a run is held to."""
        p, rows = query.problem, query.batch.total_q
        h = p.num_kv_heads
        front: tuple[int, ...]
        if isinstance(p.kv, PagedKV):
            front = (p.kv.page_size, h) if p.kv.order == "NHD" else (h, p.kv.page_size)
            least = None if max_page_id is None else max_page_id + 1
        else:
            front, least = (h,), query.batch.total_kv
        return cls(
            revision, query, decision, launch, image, host, frozen, q_len_per_req, device, workspace_bytes,
            (rows, p.num_qo_heads, p.head_dim_qk), (rows, p.num_qo_heads, p.head_dim_vo),
            (*front, p.head_dim_qk), (*front, p.head_dim_vo), least,
            p.q_dtype, p.kv_dtype, p.o_dtype, decision.path.contract,
        )  # fmt: skip

    @property
    def run_shapes(self) -> RunShapes:
        """What a backend's own checks of a run compare with."""
        lse = self.decision.path.capability.lse
        return RunShapes(self.q_shape, self.out_shape, self.kv_tail, self.v_tail, self.min_rows or 0, lse)

    @property
    def batch(self) -> HostBatch:
        """The index arrays as the plan copied them (page ids that came from the device stay there)."""
        paged = isinstance(self.query.problem.kv, PagedKV)
        ids = self.host if "kv_indices" in self.host else self.image
        return HostBatch(
            shape=self.query.batch,
            qo_indptr=self.host["qo_indptr"],
            kv_indptr=self.host["kv_indptr"],
            kv_len=self.host["kv_len"],
            kv_indices=ids["kv_indices"] if paged else None,
            kv_last_page_len=self.host["kv_last_page_len"] if paged else None,
            max_page_id=None if self.min_rows is None else self.min_rows - 1 if paged else -1,
            min_kv_len=int(self.host["kv_len"].min()) if self.query.batch.batch_size else 0,
        )


def check_q(state: PlanState, q: torch.Tensor) -> None:
    """Raise for the first fact about q that differs from the plan."""
    p = state.query.problem
    if not isinstance(q, torch.Tensor):
        raise TypeError(needs("q", "a tensor", type(q).__name__, "core.q-type"))
    if q.device != state.device:
        raise ValueError(
            needs("q", f"a tensor on {state.device}, as the workspace is", q.device, "core.device")
        )
    if q.dtype is not p.q_dtype:
        text = needs("q", f"the planned q_data_type {p.q_dtype}", q.dtype, "core.q-dtype")
        raise ValueError(f"{text}; pass q_data_type={q.dtype} to plan()")
    if q.ndim != 3 or q.shape[1:] != state.q_shape[1:]:
        want = f"shape [rows, {p.num_qo_heads}, {p.head_dim_qk}]"
        raise ValueError(needs("q", want, tuple(q.shape), "core.q-shape"))
    if q.shape[0] != state.q_shape[0]:
        raise ValueError(_rows_message(state, q.shape[0]))


def _rows_message(state: PlanState, rows: int) -> str:
    planned, batch = state.q_shape[0], state.query.batch.batch_size
    if state.q_len_per_req is None:
        return needs("q", f"{planned} rows, the planned qo_indptr[-1]", rows, "core.q-rows")
    per = f"q_len_per_req {state.q_len_per_req}"
    text = needs("q", f"{planned} rows (batch {batch} x planned {per})", rows, "core.q-rows")
    if state.query.problem.use_tensor_cores:
        return f"{text}; call plan() again with the q_len_per_req you run"
    return f"{text}; several rows per request need a wrapper with use_tensor_cores=True"


def check_kv(state: PlanState, name: str, t: torch.Tensor, tail: tuple[int, ...]) -> None:
    """Raise for the first fact about k or v that differs from the plan."""
    p = state.query.problem
    if t.device != state.device:
        raise ValueError(needs(name, f"a tensor on {state.device}, as q is", t.device, "core.device"))
    if t.dtype is not p.kv_dtype:
        text = needs(name, f"the planned kv_data_type {p.kv_dtype}", t.dtype, "core.kv-dtype")
        raise ValueError(
            f"{text}; the bytes are never read as another type: plan with kv_data_type={t.dtype}"
        )
    if tuple(t.shape[1:]) != tail:
        sizes, got = ["pages" if p.op.paged else "tokens", *map(str, tail)], list(t.shape)
        if not p.op.paged and p.kv.order == "HND":  # as the caller sees it: it was turned on its way here
            sizes[:2], got[:2] = sizes[1::-1], got[1::-1]
        want = f"shape [{', '.join(sizes)}] ({p.kv.order})"
        raise ValueError(needs(name, want, tuple(got), "core.kv-shape"))
    if state.min_rows is not None and t.shape[0] < state.min_rows:
        what = f"more than {state.min_rows - 1} pages, the largest page id of the plan"
        want = what if p.op.paged else f"{state.min_rows} tokens"
        raise ValueError(needs(name, want, t.shape[0], "core.kv-rows"))


def check_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise for a tensor whose memory does not hold its values; see ``checking.dense``."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        dense(name, t, "core.layout")


def check_contract(contract: TensorContract, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise where strides are not what the chosen path can read. A dimension of size 1 has no stride."""
    for name, t in (("k", k), ("v", v)):
        if contract.dense_head_dim and t.shape[-1] > 1 and t.stride(-1) != 1:
            raise ValueError(needs(name, "stride 1 over head_dim", t.stride(-1), "core.kv-stride"))
    if contract.same_kv_strides and _strides(k) != _strides(v):
        got = f"{k.stride()} and {v.stride()}"
        raise ValueError(
            needs("k and v must have identical strides", "one set of strides", got, "core.kv-stride")
        )


def _strides(t: torch.Tensor) -> list[int]:
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]


def fit_q(contract: TensorContract, q: torch.Tensor) -> torch.Tensor:
    """Return q as the path can read it; copies only a q whose heads are spread out."""
    packed = contract.q == "packed" and q.shape[1] > 1 and q.stride(1) != q.shape[2]
    return q.contiguous() if q.stride(2) != 1 or packed else q


def check_output(
    name: str, t: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return an ``out=`` or ``lse=`` tensor if a run can write it.

    Raises:
        TypeError: Not a tensor.
        ValueError: Shape, dtype or device differ, or rows overlap.
    """
    dense(name, t, f"core.{name}")
    if t.shape != shape:
        raise ValueError(needs(name, f"shape {shape}", tuple(t.shape), f"core.{name}"))
    if t.dtype is not dtype:
        raise ValueError(needs(name, f"dtype {dtype}", t.dtype, f"core.{name}"))
    if t.device != device:
        raise ValueError(needs(name, f"a tensor on {device}", t.device, f"core.{name}"))
    return apart(name, t, f"core.{name}")


def check_scale(name: str, value: object, device: torch.device) -> Scale:
    """Return a per-tensor scale; None is 1.0. A tensor stays on its device: no value is read back.

    Raises:
        TypeError: Neither a number nor a dense tensor.
        ValueError: A tensor of more than one element, without memory, or on another device; a number, or the
            value of a tensor on the CPU, that is not finite.
    """
    if value is None:
        return 1.0
    if isinstance(value, torch.Tensor):
        dense(name, value, "core.scale")
        if value.numel() != 1:
            raise ValueError(needs(name, "one element (per-tensor)", tuple(value.shape), "core.scale"))
        if value.device.type != "cpu" and value.device != device:
            raise ValueError(needs(name, f"a tensor on {device}", value.device, "core.scale"))
        if value.device.type != "cpu":
            return value.reshape(()).float()
        return finite(name, float(value), "core.scale")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(needs(name, "a number or a one-element tensor", type(value).__name__, "core.scale"))
    return finite(name, value, "core.scale")


def ask_direct(s: PlanState, io: RunIO) -> None:
    """Ask the backend for its own way to run a plan, once; a plan that is run a single time needs none."""
    slot = s.direct
    if slot.ran and not slot.asked:
        slot.asked = True
        ask = getattr(s.decision.backend, "direct", None)
        if ask is not None:
            slot.call = ask(s.launch, s.image, io, s.run_shapes)
    slot.ran = True


def set_scales(s: PlanState, io: RunIO, q_scale: object, k_scale: object, v_scale: object) -> None:
    """Check the scales of a run and put them in place; refuse those that the path cannot apply."""
    io.q_scale = check_scale("q_scale", q_scale, s.device)
    io.k_scale = check_scale("k_scale", k_scale, s.device)
    io.v_scale = check_scale("v_scale", v_scale, s.device)
    if not s.decision.path.contract.scales:
        got = {"q_scale": io.q_scale, "k_scale": io.k_scale, "v_scale": io.v_scale}
        other = {
            name: value for name, value in got.items() if isinstance(value, torch.Tensor) or value != 1.0
        }
        if other:
            name, value = next(iter(other.items()))
            raise NotImplementedError(needs(f"{s.decision.candidate}: {name}", "1.0", value, "core.scale"))
