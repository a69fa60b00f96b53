"""Attention of one request over contiguous keys and values, without a wrapper."""

from __future__ import annotations

import threading
from functools import partial
from typing import Literal, overload

import torch
from torch.compiler import is_dynamo_compiling

from . import capture, plugins, tracing
from .arguments import as_dtype, mask_bits, refuse
from .batch import single_batch
from .capability import GraphSupport
from .checking import backend_name, dense, flag
from .errors import needs
from .options import Dtype, make_problem
from .prefill_common import mask_mode
from .problem import AttentionProblem, MaskMode, Op, RaggedKV, check_kv_order
from .route import AUTO
from .run_options import Pair, Result
from .state import PlanState
from .tracing import Scale
from .wrapper import OwnWorkspace


class _OneCall(OwnWorkspace):
    """A wrapper planned for a call."""

    def __init__(self, device: torch.device, backend: str) -> None:
        super().__init__(device, "NHD", backend)
        self.kept: dict[object, PlanState] = {}

    def _refuse_eager_capture(self) -> None:
        """Captured are plans that an earlier call made; see :func:`_replayable`."""

    def planned_for(self, key: object, problem: AttentionProblem, q_len: int, kv_len: int) -> PlanState:
        """Return the plan of a call without a mask: layers of a model ask for the same one in turns."""
        found = self.kept.pop(key, None)
        if found is None:
            self._plan(problem, single_batch(q_len, kv_len))
            found = self._planned()
            if len(self.kept) >= _KEPT_PLANS:
                del self.kept[next(iter(self.kept))]
        self.kept[key] = found  # the last one used goes to the end
        self._provide(found.workspace_bytes)
        return found


_KEPT_PLANS = 16
# One per thread: between plan() and run() the wrapper must not be planned by somebody else.
_mine = threading.local()
# Plans that a graph of this process may replay: their index arrays have to stay where they are.
_captured: dict[int, PlanState] = {}


def _wrapper(device: torch.device, backend: str) -> _OneCall:
    kept: dict[tuple[torch.device, str], _OneCall] = _mine.__dict__.setdefault("wrappers", {})
    key = (device, backend_name(backend))
    if key not in kept:
        kept[key] = _OneCall(device, backend)
    return kept[key]


def _replayable(wrapper: _OneCall, key: object, mask: MaskMode) -> PlanState:
    """Return the plan to capture: that of an earlier call, as planning writes memory that a graph would not.

    Raises:
        RuntimeError: There was no such call, or its kernel cannot be captured.
    """
    if mask is MaskMode.CUSTOM:
        raise RuntimeError(
            needs("custom_mask", "a call outside graph capture", "one during it", "core.eager-in-capture")
        )
    state = wrapper.kept.get(key)
    if state is None:
        want = "one call with these shapes and options on this thread before graph capture"
        raise RuntimeError(needs("single attention", want, "none", "core.eager-in-capture"))
    if state.decision.path.capability.graph is GraphSupport.NEVER:
        want = "a kernel that can be captured (see backend=)"
        raise RuntimeError(needs("single attention", want, state.decision.candidate, "core.eager-in-capture"))
    _captured[id(state)] = state
    return state


@overload
def single_decode_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE", use_tensor_cores: bool = False, q_scale: Scale = None,
    k_scale: Scale = None, v_scale: Scale = None, window_left: int = -1,
    logits_soft_cap: float | None = None, sm_scale: float | None = None, rope_scale: float | None = None,
    rope_theta: float | None = None, return_lse: Literal[False] = False
) -> torch.Tensor: ...  # fmt: skip
@overload
def single_decode_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE", use_tensor_cores: bool = False, q_scale: Scale = None,
    k_scale: Scale = None, v_scale: Scale = None, window_left: int = -1,
    logits_soft_cap: float | None = None, sm_scale: float | None = None, rope_scale: float | None = None,
    rope_theta: float | None = None, *, return_lse: Literal[True]
) -> Pair: ...  # fmt: skip
@overload
def single_decode_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE", use_tensor_cores: bool = False, q_scale: Scale = None,
    k_scale: Scale = None, v_scale: Scale = None, window_left: int = -1,
    logits_soft_cap: float | None = None, sm_scale: float | None = None, rope_scale: float | None = None,
    rope_theta: float | None = None, return_lse: bool = False
) -> Result: ...  # fmt: skip


def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: Scale = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Result:
    """Attend with one query token over a contiguous cache.

    May be captured if the same call, with the same shapes, was made once before on this thread.

    Args:
        q: ``[num_qo_heads, head_dim_qk]``.
        k: ``[kv_len, num_kv_heads, head_dim_qk]`` (NHD) or ``[num_kv_heads, kv_len, head_dim_qk]`` (HND).
        v: As ``k`` with ``head_dim_vo``; strides are its own.
        kv_layout: ``NHD`` or ``HND``.
        pos_encoding_mode: 'NONE', 'ROPE_LLAMA' or 'ALIBI'.
        use_tensor_cores: Ask for the matrix path.
        q_scale: Multiplies q; a number or a one-element tensor, as the next two.
        k_scale: Multiplies k.
        v_scale: Multiplies the output.
        window_left: Keys left of the last one that are seen; -1 for all.
        logits_soft_cap: ``cap * tanh(x / cap)`` before the mask.
        sm_scale: Default ``1 / sqrt(head_dim_qk)``.
        rope_scale: Position divisor of ROPE_LLAMA.
        rope_theta: Base of ROPE_LLAMA.
        return_lse: Also return the log-sum-exp, base 2.

    Returns:
        ``[num_qo_heads, head_dim_vo]`` in q's type, or that and float32 ``[num_qo_heads]``.

    Raises:
        ValueError: A shape, device or option does not fit.
        RuntimeError: Captured without an earlier call, or with a kernel that cannot be.
        NotImplementedError: No backend serves the combination.
    """
    if dense("q", q, "core.q-shape").ndim != 2:
        raise ValueError(needs("q", "shape [num_qo_heads, head_dim]", tuple(q.shape), "core.q-shape"))
    use_tensor_cores = flag("use_tensor_cores", use_tensor_cores)
    if is_dynamo_compiling():
        return tracing.call(  # type: ignore[no-any-return]
            "single", (q_scale, k_scale, v_scale), q, k, v, None, return_lse, None, None, "decode", False,
            kv_layout, pos_encoding_mode, use_tensor_cores, window_left, logits_soft_cap, sm_scale,
            rope_scale, rope_theta, AUTO,
        )  # fmt: skip
    found = _attend(
        Op.DECODE_SINGLE,
        q[None],
        k,
        v,
        kv_layout,
        MaskMode.NONE,
        None,
        None,
        pos_encoding_mode,
        use_tensor_cores,
        (q_scale, k_scale, v_scale),
        window_left,
        logits_soft_cap,
        sm_scale,
        rope_scale,
        rope_theta,
        None,
        AUTO,
        return_lse,
    )  # fmt: skip
    return (found[0][0], found[1][0]) if isinstance(found, tuple) else found[0]


@overload
def single_prefill_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None, scale_v: torch.Tensor | None = None, o_dtype: Dtype | None = None,
    custom_mask: torch.Tensor | None = None, packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False, sm_scale: float | None = None, window_left: int = -1,
    logits_soft_cap: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None,
    backend: str = "auto", return_lse: Literal[False] = False, kv_cache_sf: object | None = None,
    k_scale: Scale = None, v_scale: Scale = None
) -> torch.Tensor: ...  # fmt: skip
@overload
def single_prefill_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None, scale_v: torch.Tensor | None = None, o_dtype: Dtype | None = None,
    custom_mask: torch.Tensor | None = None, packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False, sm_scale: float | None = None, window_left: int = -1,
    logits_soft_cap: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None,
    backend: str = "auto", *, return_lse: Literal[True], kv_cache_sf: object | None = None,
    k_scale: Scale = None, v_scale: Scale = None
) -> Pair: ...  # fmt: skip
@overload
def single_prefill_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None, scale_v: torch.Tensor | None = None, o_dtype: Dtype | None = None,
    custom_mask: torch.Tensor | None = None, packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False, sm_scale: float | None = None, window_left: int = -1,
    logits_soft_cap: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None,
    backend: str = "auto", return_lse: bool = False, kv_cache_sf: object | None = None,
    k_scale: Scale = None, v_scale: Scale = None
) -> Result: ...  # fmt: skip


def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    o_dtype: Dtype | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: object | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> Result:
    """Attend with the last tokens of one sequence over all of it.

    May be captured, without a custom mask, if the same call was made once before on this thread.

    Args:
        q: ``[qo_len, num_qo_heads, head_dim_qk]``.
        k: ``[kv_len, num_kv_heads, head_dim_qk]`` (NHD) or ``[num_kv_heads, kv_len, head_dim_qk]`` (HND).
        v: As ``k`` with ``head_dim_vo``; strides are its own.
        scale_q: Not supported (per-head fp8 scales), as the next two.
        scale_k: Not supported.
        scale_v: Not supported.
        o_dtype: Output type; q's by default.
        custom_mask: bool ``[qo_len, kv_len]`` or flat; True keeps. Replaces ``causal``.
        packed_custom_mask: The same as uint8 bits, little-endian.
        causal: Bottom-right aligned; a row without a key gives out 0 and lse -inf.
        kv_layout: ``NHD`` or ``HND``.
        pos_encoding_mode: 'NONE', 'ROPE_LLAMA' or 'ALIBI'.
        use_fp16_qk_reduction: Permits a less exact sum; no backend here makes use of it.
        sm_scale: Default ``1 / sqrt(head_dim_qk)``.
        window_left: Keys left of a row's own position that it sees; -1 for all.
        logits_soft_cap: ``cap * tanh(x / cap)`` before the mask.
        rope_scale: Position divisor of ROPE_LLAMA.
        rope_theta: Base of ROPE_LLAMA.
        backend: ``auto``, a backend, or a candidate ``backend/path``.
        return_lse: Also return the log-sum-exp, base 2.
        kv_cache_sf: Not supported.
        k_scale: Multiplies k; a number or a one-element tensor.
        v_scale: Multiplies the output.

    Returns:
        ``[qo_len, num_qo_heads, head_dim_vo]``, or that and float32 ``[qo_len, num_qo_heads]``.

    Raises:
        ValueError: A shape, device, mask or option does not fit.
        RuntimeError: Captured without an earlier call, with a mask, or with a kernel that cannot be.
        NotImplementedError: No backend serves the combination.
    """
    refuse(scale_q=scale_q, scale_k=scale_k, scale_v=scale_v, kv_cache_sf=kv_cache_sf)
    if is_dynamo_compiling():
        return tracing.call(  # type: ignore[no-any-return]
            "single", (None, k_scale, v_scale), q, k, v,
            None if o_dtype is None else as_dtype("o_dtype", o_dtype), return_lse, custom_mask,
            packed_custom_mask, "prefill", causal, kv_layout, pos_encoding_mode, True, window_left,
            logits_soft_cap, sm_scale, rope_scale, rope_theta, backend,
        )  # fmt: skip
    mode = mask_mode(causal, custom_mask, packed_custom_mask)
    return _attend(
        Op.PREFILL_SINGLE,
        q,
        k,
        v,
        kv_layout,
        mode,
        custom_mask,
        packed_custom_mask,
        pos_encoding_mode,
        True,
        (None, k_scale, v_scale),
        window_left,
        logits_soft_cap,
        sm_scale,
        rope_scale,
        rope_theta,
        o_dtype,
        backend,
        return_lse,
    )  # fmt: skip


single_prefill_with_kv_cache_return_lse = partial(single_prefill_with_kv_cache, return_lse=True)


def _attend(
    op: Op,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str,
    mode: MaskMode,
    custom_mask: torch.Tensor | None,
    packed_custom_mask: torch.Tensor | None,
    pos_encoding_mode: str,
    use_tensor_cores: bool,
    scales: tuple[Scale, Scale, Scale],
    window_left: int,
    logits_soft_cap: float | None,
    sm_scale: float | None,
    rope_scale: float | None,
    rope_theta: float | None,
    o_dtype: Dtype | None,
    backend: str,
    return_lse: bool,
) -> Result:
    _check_tensors(q, k, v)
    check_kv_order(kv_layout)
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(
            needs("v", f"k's length and heads {tuple(k.shape[:2])}", tuple(v.shape[:2]), "core.kv-shape")
        )
    problem = make_problem(
        op,
        (q.shape[1], k.shape[1]),
        (q.shape[2], v.shape[2]),
        q.dtype,
        k.dtype,
        o_dtype,
        RaggedKV(kv_layout),
        mode,
        pos_encoding_mode,
        window_left,
        logits_soft_cap,
        sm_scale,
        rope_scale,
        rope_theta,
        return_lse,
        use_tensor_cores,
        None,
        False,
    )
    wrapper = _wrapper(q.device, backend)
    key = (problem, q.shape[0], k.shape[0], plugins.registry())
    if capture.capturing(q.device):
        state = _replayable(wrapper, key, mode)
        # Its workspace belongs to the graph, not to the calls that are made between its replays.
        wrapper = _OneCall(q.device, backend)
        wrapper._provide(state.workspace_bytes)
        return wrapper._run(q, k, v, None, None, return_lse, *scales, plan=state)
    if mode is MaskMode.CUSTOM:
        batch = single_batch(q.shape[0], k.shape[0])
        wrapper._plan(problem, batch, mask=mask_bits(custom_mask, packed_custom_mask, batch, q.device))
        return wrapper._run(q, k, v, None, None, return_lse, *scales)
    state = wrapper.planned_for(key, problem, q.shape[0], k.shape[0])
    return tracing.run_plan(wrapper, state, q, k, v, None, None, return_lse, scales)


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, torch.Tensor) or t.ndim != 3 or t.is_nested:
            got = tuple(dense(name, t, "core.kv-shape", "a 3-D tensor").shape)
            raise ValueError(needs(name, "a 3-D tensor", got, "core.kv-shape"))
