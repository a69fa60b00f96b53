"""What the public wrappers share: the plan in force, and a run held to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from . import capture, state, tracing
from .arguments import check_workspace, refuse
from .backend import RunIO
from .cache_view import unpack
from .checking import apart_from, dense, device_of, flag, in_storage, no_autocast, readable, whole
from .engine_view import EngineView
from .errors import needs
from .planner import check_bytes
from .problem import MaskMode
from .route import AUTO, RouteDecision
from .sinks import add_sink, sink_and_scale
from .state import PlanState

_CACHES = (tuple, torch.Tensor)  # what a backend's own checks of a run know


class AttentionWrapper(EngineView):
    """Base of the public wrappers."""

    _with_sink = False
    """Whether run() takes an attention sink, and every plan serves its log-sum-exp."""

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper keeps fixed buffers and a fixed shape, ready for graph capture."""
        return self._graph is not None

    @property
    def route(self) -> RouteDecision | None:
        """The decision in force: candidate and all refusals met; None before the first plan()."""
        return None if self._state is None else self._state.decision

    @property
    def backend(self) -> str:
        """Name of the backend that serves the plan in force; what was asked for before plan()."""
        return self._requested if self._state is None else self._state.decision.backend.name

    @property
    def backend_fallback_reason(self) -> str | None:
        """Why ``auto`` passed over a better-ranked candidate, on one line; None when it did not."""
        if self._state is None or self._requested != AUTO:
            return None
        return self._state.decision.fallback_reason

    @property
    def owned_bytes(self) -> int:
        """Bytes of index memory in use for the plan in force, the caller's graph buffers included."""
        if self._state is None:
            return 0
        kept = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self._state.image.values()
        }
        return sum(kept.values())

    @property
    def _backend(self) -> str:
        return self.backend

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Replace the float workspace; the next plan() uses it.

        A captured graph keeps reading the buffer it was captured with: keep that one alive.

        Args:
            float_workspace_buffer: Scratch bytes on the wrapper's device, aligned to 16 bytes.
            int_workspace_buffer: Checked and not used: index arrays live in memory of the plan.

        Raises:
            ValueError: Not aligned, not contiguous, another device, or too small for the plan in force.
        """
        buffer = check_workspace("float_workspace_buffer", float_workspace_buffer)
        check_workspace("int_workspace_buffer", int_workspace_buffer)
        if buffer.device != self.device:
            raise ValueError(
                needs("float_workspace_buffer", f"a tensor on {self.device}", buffer.device, "core.device")
            )
        if self._state is not None:
            check_bytes(buffer, self._state.workspace_bytes)
        self._float_workspace_buffer = buffer

    def end_forward(self) -> None:
        """Do nothing; upstream's deprecated counterpart of ``begin_forward``."""

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        q_scale: state.Scale | None,
        k_scale: state.Scale | None,
        v_scale: state.Scale | None,
        plan: PlanState | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Check one run against a plan, by default the one in force, and enqueue it."""
        if is_dynamo_compiling():
            return self._traced_run(q, k, v, out, lse, return_lse, (q_scale, k_scale, v_scale))
        s = self._state if plan is None else plan
        if s is None:
            s = self._planned()
        contract = s.contract
        try:
            self._check(s, q, k, v)
        except RuntimeError:  # torch's, of a tensor that has no sizes or strides
            state.check_dense(q, k, v)
            raise
        if out is not None:
            state.check_output("out", out, s.out_shape, s.o_dtype, s.device)
            read = (("k", k), ("v", v)) if _in_place(out, q) else (("q", q), ("k", k), ("v", v))
            apart_from("out", out, read, "core.out")
        else:
            out = _new_out(s, q)
        if return_lse is not False:
            return_lse = flag("return_lse", return_lse)
        if return_lse or lse is not None:  # one that was handed over is written, asked for or not
            lse = _lse(s, lse, (("q", q), ("k", k), ("v", v), ("out", out)))
        if contract.q != "any" and (contract.q == "packed" or q.stride()[2] != 1):
            q = state.fit_q(contract, q)
        sums = None if lse is None else _writable(lse)
        io = RunIO(q, k, v, _writable(out), sums, self._workspace(s))
        if q_scale is not None or k_scale is not None or v_scale is not None:
            state.set_scales(s, io, q_scale, k_scale, v_scale)
        if q.is_cuda:
            self._refuse_eager_capture()
        with no_autocast(s.device):
            s.decision.backend.run(s.launch, s.image, io)
        state.ask_direct(s, io)
        return (out, lse) if return_lse and lse is not None else out

    def _run_direct(
        self,
        q: torch.Tensor,
        cache: object,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        q_scale: state.Scale | None,
        k_scale: state.Scale | None,
        v_scale: state.Scale | None,
        plan: PlanState | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
        """Run by the backend's own way; None where it declined, and nothing was done."""
        s = self._state if plan is None else plan
        if is_dynamo_compiling() or s is None or s.direct.call is None or self._eager_capture():
            return None
        if (return_lse is not False and return_lse is not True) or cache.__class__ not in _CACHES:
            return None
        if out is None:
            out = _new_out(s, q)
        if return_lse and lse is None:
            lse = torch.empty(s.out_shape[:2], dtype=torch.float32, device=s.device)
        buffer = self._float_workspace_buffer if s.workspace_bytes else None
        if not s.direct.call(q, cache, out, lse, buffer, q_scale, k_scale, v_scale):
            return None
        return (out, lse) if return_lse and lse is not None else out

    def _run_paged(
        self,
        q: torch.Tensor,
        cache: object,
        args: tuple[object, ...],
        sinks: torch.Tensor | None,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        scales: tuple[state.Scale | None, state.Scale | None, state.Scale | None],
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Run over a paged cache in any of its forms."""
        extra = args or sinks is not None or self._with_sink
        if not extra:
            found = self._run_direct(q, cache, out, lse, return_lse, *scales)
            if found is not None:
                return found
        k, v = unpack(cache, self._kv_layout)
        if extra:
            what = "q and paged_kv_cache"
            return self._run_extra(what, args, sinks, (q, k, v), out, lse, return_lse, scales)
        return self._run(q, k, v, out, lse, return_lse, *scales)

    def _run_extra(
        self,
        what: str,
        args: tuple[object, ...],
        sinks: torch.Tensor | None,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        scales: tuple[state.Scale | None, state.Scale | None, state.Scale | None],
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Run with what came behind q and the cache: the sink and the scale of the variant with a sink."""
        if not self._with_sink:
            refuse(sinks=sinks)
            if args:
                raise TypeError(needs("run", f"{what} by position", f"{len(args)} more", "core.arguments"))
            return self._run(*tensors, out, lse, return_lse, *scales)
        p = self._planned().query.problem
        args = args if sinks is None else (sinks, *args)
        sink, factor = sink_and_scale(args, p.num_qo_heads, self.device, p.sm_scale)
        q_scale, k_scale, v_scale = scales
        if factor != 1.0:
            q_scale = factor if q_scale is None else factor * q_scale
        found = self._run(*tensors, out, lse, True, q_scale, k_scale, v_scale)
        assert isinstance(found, tuple)
        add_sink(*found, sink)
        return found if flag("return_lse", return_lse) else found[0]

    def _traced_run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        scales: tuple[tracing.Scale, tracing.Scale, tracing.Scale],
    ) -> tracing.Result:
        token = self._traced_plan
        o_dtype = self._planned().o_dtype if token is None else self._traced_o_dtype
        run, wanted = tracing.tracer().run, return_lse or lse is not None
        found = run(self._handle, q, k, v, out, lse, wanted, o_dtype, scales, token)
        return found if return_lse or not isinstance(found, tuple) else found[0]

    def _check(self, s: PlanState, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Compare with the plan; the slow functions that say what is wrong run only when something is."""
        device, rows = s.device, s.min_rows or 0
        plain = q.__class__ is torch.Tensor
        if not plain or q.shape != s.q_shape or q.dtype is not s.q_dtype or q.device != device:
            state.check_q(s, q)
        if not (readable(q) and readable(k) and readable(v)):
            state.check_dense(q, k, v)
        shape = k.shape
        if shape[1:] != s.kv_tail or shape[0] < rows or k.dtype is not s.kv_dtype or k.device != device:
            state.check_kv(s, "k", k, s.kv_tail)
        # One comparison where v is shaped as k is, which has just been held to the plan.
        alike = v.shape == shape and s.v_tail == s.kv_tail
        if not alike or v.dtype is not s.kv_dtype or v.device != device:
            state.check_kv(s, "v", v, s.v_tail)
        contract = s.contract
        if contract.same_kv_strides or (
            contract.dense_head_dim and not k.stride()[-1] == v.stride()[-1] == 1
        ):
            state.check_contract(contract, k, v)

    def _check_window(self, window_left: int) -> None:
        """Raise where a run states another window than the planned one."""
        planned = self._planned().query.problem.window_left
        if whole("window_left", window_left, "core.window") != planned:
            raise ValueError(needs("window_left", f"the planned {planned}", window_left, "core.window"))

    def _eager_capture(self) -> bool:
        return self._graph is None and capture.capturing(self.device)

    def _refuse_eager_capture(self) -> None:
        if self._eager_capture():
            want = "a wrapper with use_cuda_graph=True"
            got = f"a {type(self).__name__} with use_cuda_graph=False"
            raise RuntimeError(needs("run during graph capture", want, got, "core.eager-in-capture"))

    def _workspace(self, s: PlanState) -> torch.Tensor:
        buffer = self._float_workspace_buffer
        if s.workspace_bytes and not in_storage(buffer):
            dense("float_workspace_buffer", buffer, "core.workspace")
        return buffer

    def _scaled_q(self, changes: dict[str, Any], q_scale: state.Scale | None = None) -> state.Scale | None:
        """Take ``sm_scale`` out of what a deprecated ``forward`` changes, into the scale of q.

        There it costs no plan, so that engines that name it in every layer's call can be captured.
        """
        planned = self._planned()
        wanted: float | None = changes.get("sm_scale")
        was = planned.query.problem.sm_scale
        if wanted is None or not was or not planned.decision.path.contract.scales:
            return q_scale
        del changes["sm_scale"]
        factor = wanted / was
        if abs(factor - 1.0) <= 1e-12:  # head_dim**-0.5 is not always 1 / sqrt(head_dim)
            return q_scale
        return factor * (1.0 if q_scale is None else q_scale)

    @contextmanager
    def _forwarded(
        self, changes: dict[str, Any], q_scale: state.Scale | None = None, *, causal: bool = False
    ) -> Iterator[state.Scale | None]:
        """Hold the arguments of a deprecated ``forward`` for one call; gives the scale of q to run it with.

        A custom mask stays where ``causal`` is asked for.
        """
        q_scale = self._scaled_q(changes, q_scale)
        if flag("causal", causal) and self._planned().query.problem.mask is not MaskMode.CUSTOM:
            changes["mask"] = MaskMode.CAUSAL
        with self._for_one_call(**changes):
            yield q_scale


def returning_lse(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run`` with ``return_lse`` set; a plain function, which torch.compile can trace into."""

    @wraps(run)
    def run_return_lse(self: AttentionWrapper, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`run`, returning ``(out, lse)``."""
        return run(self, *args, **{"return_lse": True, **kwargs})

    return run_return_lse


class OwnWorkspace(AttentionWrapper):
    """A wrapper that grows its float workspace to what a plan asks for."""

    def __init__(self, device: str | torch.device, kv_layout: str, backend: str) -> None:
        where = device_of(device)
        try:
            memory = torch.empty(0, dtype=torch.uint8, device=where)
        except (RuntimeError, AssertionError) as err:  # the second where torch is built without the device
            said = str(err).partition("\n")[0]
            want = "a device that torch can use here"
            raise ValueError(needs("device", want, f"{where} ({said})", "core.device")) from None
        super().__init__(memory, kv_layout, backend, None)

    def _available(self) -> None:
        return None

    def _provide(self, workspace_bytes: int) -> None:
        if self._float_workspace_buffer.numel() < workspace_bytes:
            self._float_workspace_buffer = torch.empty(workspace_bytes, dtype=torch.uint8, device=self.device)


def _new_out(s: PlanState, q: torch.Tensor) -> torch.Tensor:
    """Return memory for an output; like q if that will do, which torch is twice as fast at."""
    like = s.o_dtype is s.q_dtype and s.out_shape == s.q_shape and q.__class__ is torch.Tensor
    if like and q.layout is torch.strided and not q.is_nested:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    return torch.empty(s.out_shape, dtype=s.o_dtype, device=s.device)


def _in_place(out: torch.Tensor, q: torch.Tensor) -> bool:
    """Say whether each row is written where its query was, which nothing else reads."""
    if not torch._C._is_alias_of(out, q):  # type: ignore[attr-defined]
        return False
    return out.data_ptr() == q.data_ptr() and (out.dtype, out.stride()) == (q.dtype, q.stride())


def _writable(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor as backends may write it, with torch's operators too.

    Those refuse a leaf that requires a gradient and, outside of that mode, a tensor made in inference mode.
    """
    return t.detach() if t.requires_grad or t.is_inference() else t


def _lse(
    s: PlanState, lse: torch.Tensor | None, others: tuple[tuple[str, torch.Tensor], ...]
) -> torch.Tensor:
    """Return memory for the log-sum-exp: the caller's, if that is right and apart from the other tensors."""
    if not s.decision.path.capability.lse:
        want = f"a plan with needs_lse=True ({s.decision.candidate} has no LSE)"
        raise ValueError(needs("return_lse", want, "one without", "core.lse"))
    shape = s.out_shape[:2]
    if lse is None:
        return torch.empty(shape, dtype=torch.float32, device=s.device)
    state.check_output("lse", lse, shape, torch.float32, s.device)
    return apart_from("lse", lse, others, "core.lse")
