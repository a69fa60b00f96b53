"""What stands for upstream's compiled module, which serving engines plan behind a wrapper's back.

SGLang has copies of plan() for replayed graphs (``fast_prefill_plan``, ``fast_mla_decode_plan``): they write
the wrapper's buffers, hand lengths that are on the host already to ``_cached_module.plan`` and so wait for no
device. In graph mode paged prefill and latent wrappers serve that: all of their own plan() holds. Whatever
else was called there has a method here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from .arguments import split_size
from .checking import flag, whole
from .errors import needs
from .kv_lengths import batch_of_lengths
from .prefill_common import mask_mode
from .problem import AttentionProblem, MaskMode, Op
from .state import PlanState

if TYPE_CHECKING:
    from .planner import Planner

_ARRAYS = 6
"""Arguments before those that have names: workspaces and index arrays."""
_LATENT = ("num_qo_heads", "head_dim_vo", "causal")
_PAGED = (
    "total_num_rows", "batch_size", "num_qo_heads", "num_kv_heads", "page_size", "use_cuda_graph",
    "head_dim_qk", "head_dim_vo", "causal", "window_left",
)  # fmt: skip
_SPLIT = ("fixed_split_size", "disable_split_kv", "num_colocated_ctas", "uniform_q_len")
_NAMED = "num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo", "window_left"


class PlanModule:
    """Upstream's compiled module, as far as engines plan with it."""

    def __init__(self, wrapper: Planner) -> None:
        self._wrapper = wrapper

    def plan(self, *args: Any) -> PlanState:
        """Plan the wrapper anew for what lies in its graph buffer of page ids.

        Args:
            *args: Three workspaces, of which the wrapper's own are used; ``qo_indptr``, ``kv_indptr`` and the
                tokens of each request, int32 and best on the host; then, of a latent wrapper, ``num_heads,
                head_dim_ckv, causal``, and of a paged one ``total_num_rows, batch_size, num_qo_heads,
                num_kv_heads, page_size, use_cuda_graph, head_dim_qk, head_dim_vo, causal, window_left`` and
                as many as are there of ``fixed_split_size, disable_split_kv, num_colocated_ctas,
                uniform_q_len``.

        Returns:
            The plan.

        Raises:
            NotImplementedError: Another wrapper than these two, no graph mode, or a custom mask.
            TypeError: Another number of arguments.
            ValueError: As the wrapper's plan().
        """
        wrapper = self._wrapper
        old, graph = wrapper._state, wrapper._graph
        if old is None or graph is None or old.query.problem.op is not Op.PREFILL_PAGED:
            refuse("plan")
        problem = old.query.problem
        if problem.mask is MaskMode.CUSTOM:
            want = "the wrapper's plan() for a custom mask"
            raise NotImplementedError(needs("_cached_module.plan", want, "a call", "core.not-here"))
        given = _named(args, problem.latent)
        page_size = problem.page_size
        assert page_size is not None
        batch = batch_of_lengths(
            args[3], args[4], graph.bound["kv_indices"], args[5], page_size, device=wrapper.device
        )  # fmt: skip
        facts = {"batch_size": batch.shape.batch_size, "page_size": page_size, "use_cuda_graph": True}
        for name, is_so in facts.items():
            if given.get(name, is_so) != is_so:
                raise ValueError(needs(name, f"{is_so}, as planned", given[name], "core.graph-frozen"))
        wrapper._plan(_changed(problem, given), batch, q_len_per_req=old.q_len_per_req)
        return wrapper._planned()

    def __getattr__(self, name: str) -> NoReturn:
        refuse(name)


def refuse(name: str) -> NoReturn:
    """Raise NotImplementedError for what upstream's compiled module had under that name."""
    want = "fast_decode_plan() or the wrapper's own methods (there is no compiled module to call)"
    raise NotImplementedError(needs(f"_cached_module.{name}", want, "an access", "core.not-here"))


def _named(args: tuple[Any, ...], latent: bool) -> dict[str, Any]:
    names = _LATENT if latent else _PAGED + _SPLIT
    least = _ARRAYS + len(_LATENT if latent else _PAGED)
    if not least <= len(args) <= _ARRAYS + len(names):
        want = f"{least} to {_ARRAYS + len(names)} arguments"
        raise TypeError(needs("_cached_module.plan", want, len(args), "core.arguments"))
    return dict(zip(names, args[_ARRAYS:], strict=False))


def _changed(problem: AttentionProblem, given: dict[str, Any]) -> AttentionProblem:
    """Return the problem with what was handed over; a captured graph keeps what it was planned with."""
    changes: dict[str, Any] = {
        name: whole(name, given[name], "core.arguments") for name in _NAMED if name in given
    }
    if "fixed_split_size" in given:
        changes["fixed_split_size"] = split_size(given["fixed_split_size"])
    if "disable_split_kv" in given:
        changes["disable_split_kv"] = flag("disable_split_kv", given["disable_split_kv"])
    return replace(problem, mask=mask_mode(given["causal"], None, None), **changes)
