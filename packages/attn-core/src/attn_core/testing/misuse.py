"""Calls nobody may make: one argument of a right plan() or run() replaced by one that does not fit.

Each entry is a name and a function from the keyword arguments of the right call to those to change.
A function returns None where the mistake cannot be made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..problem import Op
from .cases import Case

Arguments = dict[str, Any]
Misuse = Callable[[Case, Arguments], Arguments | None]
NAN = math.nan


def _index(name: str, change: Callable[[torch.Tensor], object]) -> Misuse:
    def misuse(case: Case, right: Arguments) -> Arguments | None:
        if name not in right or right[name].numel() == 0:
            return None
        return {name: change(right[name].clone())}

    return misuse


def _put(at: int, value: Callable[[torch.Tensor], int]) -> Callable[[torch.Tensor], object]:
    def change(t: torch.Tensor) -> torch.Tensor:
        t[at] = value(t)
        return t

    return change


def _value(name: str, value: object) -> Misuse:
    return lambda case, right: {name: value} if name in right else None


_POINTERS = ("qo_indptr", "indptr", "paged_kv_indptr", "kv_indptr")
_PAGES = ("indices", "paged_kv_indices")
_LAST = ("last_page_len", "paged_kv_last_page_len")
_KINDS: Mapping[str, Callable[[torch.Tensor], object]] = {
    "float": lambda t: t.float(),
    "uint8": lambda t: t.to(torch.uint8),
    "bool": lambda t: t.bool(),
    "2-D": lambda t: t[None],
    "list": lambda t: t.tolist(),
    "none": lambda t: None,
    "meta": lambda t: t.to("meta"),
}


def _index_misuses() -> dict[str, Misuse]:
    found: dict[str, Misuse] = {}
    for name in (*_POINTERS, *_PAGES, *_LAST):
        for kind, change in _KINDS.items():
            found[f"{name}:{kind}"] = _index(name, change)
    for name in _POINTERS:
        found[f"{name}:first"] = _index(name, _put(0, lambda t: 1))
        found[f"{name}:negative"] = _index(name, _put(-1, lambda t: -1 if t.numel() > 1 else 1))
        found[f"{name}:int32-wrap"] = _index(
            name, lambda t: torch.cat([t[:-1].long(), torch.tensor([2**40])]) if t.numel() > 1 else None
        )
        found[f"{name}:empty"] = _index(name, lambda t: t[:0])
        found[f"{name}:long"] = _index(name, lambda t: torch.cat([t, t[-1:]]))
    for name in _PAGES:
        found[f"{name}:short"] = _pages(name, lambda t, used: t[: used - 1])
        found[f"{name}:negative"] = _pages(name, lambda t, used: _put(used - 1, lambda _: -1)(t))
    for name in _LAST:
        found[f"{name}:short"] = _index(name, lambda t: t[:-1])
        found[f"{name}:long"] = _index(name, lambda t: torch.cat([t, t[-1:]]))
        found[f"{name}:zero"] = _last(name, 0)
        found[f"{name}:over"] = _last(name, None)
        found[f"{name}:negative"] = _last(name, -3)
    return found


def _pages(name: str, change: Callable[[torch.Tensor, int], object]) -> Misuse:
    """Change one of the page ids that are used; the given tensor may be longer."""

    def misuse(case: Case, right: Arguments) -> Arguments | None:
        size = case.problem.page_size or 1
        used = sum(-(-n // size) for n in case.lengths.kv_len)
        return {name: change(right[name].clone(), used)} if name in right and used else None

    return misuse


def _last(name: str, value: int | None) -> Misuse:
    def misuse(case: Case, right: Arguments) -> Arguments | None:
        owners = [n for n, kv in enumerate(case.lengths.kv_len) if kv]
        if name not in right or not owners or right[name].numel() <= owners[-1]:
            return None
        t = right[name].clone()
        t[owners[-1]] = (case.problem.page_size or 1) + 1 if value is None else value
        return {name: t}

    return misuse


def _mask(change: Callable[[torch.Tensor], object]) -> Misuse:
    def misuse(case: Case, right: Arguments) -> Arguments | None:
        for name in ("custom_mask", "packed_custom_mask"):
            mask = right.get(name)
            if mask is not None and mask.numel():
                return {name: change(mask.clone())}
        return None

    return misuse


def _other_packed(case: Case, right: Arguments) -> Arguments | None:
    mask = right.get("custom_mask")
    if mask is None or mask.numel() == 0:
        return None
    packed = torch.zeros(0, dtype=torch.uint8)
    return {"packed_custom_mask": packed}


def _seq_lens(change: Callable[[torch.Tensor], torch.Tensor]) -> Misuse:
    def misuse(case: Case, right: Arguments) -> Arguments | None:
        if not case.lengths.kv_len:
            return None
        return {"seq_lens": change(torch.tensor(case.lengths.kv_len, dtype=torch.int32))}

    return misuse


def _prefill(**wrong: object) -> Misuse:
    return lambda case, right: None if case.problem.op in (Op.DECODE, Op.VERIFY) else wrong


def _decode(**wrong: object) -> Misuse:
    return lambda case, right: wrong if case.problem.op in (Op.DECODE, Op.VERIFY) else None


def _paged(**wrong: object) -> Misuse:
    return lambda case, right: wrong if case.problem.op.paged else None


def _anywhere(**wrong: object) -> Misuse:
    return lambda case, right: wrong


def _shorter(case: Case, right: Arguments) -> Arguments | None:
    most = max(case.lengths.kv_len, default=0)
    return {"max_sequence_kv": most - 1} if most and case.problem.op not in (Op.DECODE, Op.VERIFY) else None


def _fewer(case: Case, right: Arguments) -> Arguments | None:
    most = max(case.lengths.q_len, default=0)
    wrong = {"max_token_per_sequence": most - 1}
    return wrong if most and case.problem.op not in (Op.DECODE, Op.VERIFY) else None


def _rows(case: Case, right: Arguments) -> Arguments | None:
    wrong = {"seq_lens_q": torch.tensor([n + 1 for n in case.lengths.q_len], dtype=torch.int32)}
    return wrong if case.lengths.q_len and case.problem.op not in (Op.DECODE, Op.VERIFY) else None


def _drafts(case: Case, right: Arguments) -> Arguments | None:
    """More rows than the shortest request has keys."""
    if case.problem.op is not Op.VERIFY or not case.lengths.kv_len:
        return None
    return {"q_len_per_req": min(case.lengths.kv_len) + 1}


def _odd_rope(case: Case, right: Arguments) -> Arguments | None:
    return {"pos_encoding_mode": "ROPE_LLAMA"} if case.problem.head_dim_qk % 2 else None


def _ragged_heads(case: Case, right: Arguments) -> Arguments | None:
    p = case.problem
    return {"num_qo_heads": p.num_qo_heads + 1} if p.num_kv_heads > 1 else None


def _heads(name: str) -> dict[str, Misuse]:
    wrong = {"0": 0, "-1": -1, "float": 2.0, "bool": True, "str": "2", "none": None}
    return {f"{name}:{kind}": _value(name, value) for kind, value in wrong.items()}


_BIT = torch.zeros(1, dtype=torch.int32)
PLAN: dict[str, Misuse] = {
    **_index_misuses(),
    **_heads("num_qo_heads"), **_heads("num_kv_heads"), **_heads("head_dim"), **_heads("head_dim_qk"),
    **_heads("page_size"),
    "heads:ragged": _ragged_heads,
    "head_dim_vo:0": _prefill(head_dim_vo=0), "head_dim_vo:float": _prefill(head_dim_vo=64.0),
    "window:-2": _anywhere(window_left=-2), "window:float": _anywhere(window_left=1.5),
    "window:none": _anywhere(window_left=None), "window_right": _decode(window_right=1),
    "cap:negative": _anywhere(logits_soft_cap=-1.0), "cap:nan": _anywhere(logits_soft_cap=NAN),
    "cap:list": _anywhere(logits_soft_cap=[30.0]), "q_dtype:list": _anywhere(q_data_type=[torch.float16]),
    "cap:inf": _anywhere(logits_soft_cap=math.inf), "cap:str": _anywhere(logits_soft_cap="30"),
    "sm_scale:nan": _anywhere(sm_scale=NAN), "sm_scale:str": _anywhere(sm_scale="1"),
    "sm_scale:tensor": _anywhere(sm_scale=torch.ones(2)),
    "rope_scale:0": _anywhere(rope_scale=0.0), "rope_theta:-1": _anywhere(rope_theta=-1.0),
    "pos:name": _anywhere(pos_encoding_mode="rope"), "pos:none": _anywhere(pos_encoding_mode=None),
    "pos:odd": _odd_rope,
    "q_dtype:name": _anywhere(q_data_type="float15"), "q_dtype:int": _anywhere(q_data_type=torch.int32),
    "q_dtype:type": _anywhere(q_data_type=16), "q_dtype:none": _prefill(q_data_type=None),
    "kv_dtype:int8": _anywhere(kv_data_type=torch.int8), "kv_dtype:type": _anywhere(kv_data_type=float),
    "o_dtype:bool": _anywhere(o_data_type=torch.bool),
    "o_dtype:name": _anywhere(o_data_type="half precision"),
    "split:float": _anywhere(fixed_split_size=1.5), "split:bool": _anywhere(fixed_split_size=True),
    "q_len:0": _decode(q_len_per_req=0), "q_len:-1": _decode(q_len_per_req=-1),
    "q_len:float": _decode(q_len_per_req=2.0), "q_len:none": _decode(q_len_per_req=None), "q_len:kv": _drafts,
    "seq_lens:over": _seq_lens(lambda t: t + 1), "seq_lens:short": _seq_lens(lambda t: t[:-1]),
    "seq_lens:float": _seq_lens(lambda t: t.float()),
    "seq_lens_q": _rows, "max_kv": _shorter, "max_q": _fewer, "max_kv:str": _prefill(max_sequence_kv="9"),
    "mask:short": _mask(lambda m: m[:-1]), "mask:long": _mask(lambda m: torch.cat([m, m[:1]])),
    "mask:float": _mask(lambda m: m.float()), "mask:int": _mask(lambda m: m.int()),
    "mask:list": _mask(lambda m: m.tolist()), "mask:both": _other_packed,
    "prefix_len": _prefill(prefix_len_ptr=_BIT), "items": _prefill(token_pos_in_items_ptr=_BIT),
    "block_tables": _paged(block_tables=_BIT[None]),
    "unknown": _anywhere(frobnicate=1),
}  # fmt: skip
"""Wrong plans."""


def _tensor(name: str, change: Callable[[torch.Tensor], object]) -> Misuse:
    def misuse(case: Case, right: Arguments) -> Arguments | None:
        if not isinstance(right.get(name), torch.Tensor):
            return None
        return {name: change(right[name])}

    return misuse


def _cache(change: Callable[[torch.Tensor], object], which: int) -> Misuse:
    """Change the keys (0) or the values (1), whether they come as a pair or each on its own."""

    def misuse(case: Case, right: Arguments) -> Arguments | None:
        if "k" in right:
            return {"kv"[which]: change(right["kv"[which]])}
        pair = right["paged_kv_cache"]
        if not isinstance(pair, tuple):
            return None
        return {"paged_kv_cache": tuple(change(t) if n == which else t for n, t in enumerate(pair))}

    return misuse


def _more_heads(which: int) -> Misuse:
    def misuse(case: Case, right: Arguments) -> Arguments | None:
        axis = -2 if case.problem.kv.order == "NHD" else -3
        return _cache(lambda t: torch.cat([t, t], axis), which)(case, right)

    return misuse


def _rowless(change: Callable[[torch.Tensor], object], which: int) -> Misuse:
    """As ``_cache``, for mistakes that need at least one key."""
    inner = _cache(change, which)
    return lambda case, right: inner(case, right) if any(case.lengths.kv_len) else None


def _other_float(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.bfloat16 if t.dtype is torch.float16 else torch.float16)


def _one_more(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t, t.new_zeros(1, *t.shape[1:])])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _form(cache: object) -> Misuse:
    return lambda case, right: {"paged_kv_cache": cache} if "paged_kv_cache" in right else None


def _out(name: str, change: Callable[[torch.Tensor], object]) -> Misuse:
    def misuse(case: Case, right: Arguments) -> Arguments | None:
        p, rows = case.problem, sum(case.lengths.q_len)
        shape = (rows, p.num_qo_heads, p.head_dim_vo)
        right_out = torch.zeros(shape, dtype=p.o_dtype, device=case.device)
        if name == "out":
            return {"out": change(right_out)}
        return {"lse": change(torch.zeros(shape[:2], device=case.device)), "return_lse": True}

    return misuse


def _planned_window(case: Case, right: Arguments) -> Arguments | None:
    return {"window_left": case.problem.window_left + 1} if case.problem.op.paged else None


def _fewer_requests(case: Case, right: Arguments) -> Arguments | None:
    found = {name: right[name][:-1] for name in (*_POINTERS, *_LAST) if name in right}
    return found if len(case.lengths.kv_len) > 1 else None


def _more_pages(case: Case, right: Arguments) -> Arguments | None:
    """A last request that alone fills every page of the buffer."""
    size, name = case.problem.page_size, next((n for n in _PAGES if n in right), None)
    if size is None or name is None:
        return None
    pointer = "indptr" if "indptr" in right else "paged_kv_indptr"
    indptr = right[pointer].clone()
    indptr[-1] += 4096
    pages = torch.zeros(int(indptr[-1]), dtype=torch.int32)
    return {name: pages, pointer: indptr}


def _more_rows(case: Case, right: Arguments) -> Arguments | None:
    if "qo_indptr" not in right:
        return {"q_len_per_req": right["q_len_per_req"] + 1}
    indptr = right["qo_indptr"].clone()
    indptr[-1] += 4096
    return {"qo_indptr": indptr} if case.mask not in ("custom", "packed") else None


def _frozen(name: str, change: Callable[[Case], object]) -> Misuse:
    return lambda case, right: {name: change(case)}


GRAPH: dict[str, Misuse] = {
    "graph:requests": _fewer_requests,
    "graph:pages": _more_pages,
    "graph:rows": _more_rows,
    "graph:heads": _frozen("num_qo_heads", lambda case: case.problem.num_qo_heads * 2),
    "graph:window": _frozen("window_left", lambda case: case.problem.window_left + 5),
    "graph:cap": _frozen("logits_soft_cap", lambda case: case.problem.logits_soft_cap + 3.0),
    "graph:scale": _frozen("sm_scale", lambda case: case.problem.sm_scale * 2),
    "graph:lse": _frozen("needs_lse", lambda case: not case.problem.needs_lse),
    "graph:split": _frozen("disable_split_kv", lambda case: not case.problem.disable_split_kv),
}
"""Plans that are right for an eager wrapper and not for one whose graph was captured."""

RUN: dict[str, Misuse] = {
    "q:dtype": _tensor("q", _other_float),
    "q:float64": _tensor("q", lambda t: None if t.dtype is torch.float64 else t.double()),
    "q:int": _tensor("q", lambda t: t.int()), "q:rows": _tensor("q", _one_more),
    "q:fewer": _tensor("q", lambda t: t[:-1] if t.shape[0] else t[None]),
    "q:heads": _tensor("q", lambda t: torch.cat([t, t], 1)),
    "q:dim": _tensor("q", lambda t: torch.cat([t, t], 2)),
    "q:2-D": _tensor("q", lambda t: t.flatten(1)), "q:4-D": _tensor("q", lambda t: t[None]),
    "q:list": _tensor("q", lambda t: []), "q:none": _tensor("q", lambda t: None),
    "q:meta": _tensor("q", lambda t: t.to("meta")),
    "k:dtype": _cache(_other_float, 0), "v:dtype": _cache(_other_float, 1),
    "k:bytes": _cache(lambda t: t.view(_INTEGERS[t.dtype.itemsize]), 0),
    "k:heads": _more_heads(0), "v:heads": _more_heads(1),
    "k:dim": _cache(lambda t: torch.cat([t, t], -1), 0), "v:dim": _cache(lambda t: torch.cat([t, t], -1), 1),
    "k:rows": _rowless(lambda t: t[:1] if t.ndim == 4 else t[:0, :0], 0),
    "v:rows": _rowless(lambda t: t[:1] if t.ndim == 4 else t[:0, :0], 1),
    "k:ndim": _cache(lambda t: t[None], 0), "v:ndim": _cache(lambda t: t.flatten(), 1),
    "k:meta": _cache(lambda t: t.to("meta"), 0), "v:meta": _cache(lambda t: t.to("meta"), 1),
    "k:none": _cache(lambda t: None, 0), "v:list": _cache(lambda t: t.tolist(), 1),
    "cache:list": _form([1, 2]), "cache:none": _form(None), "cache:1-tuple": _form((torch.zeros(1),)),
    "cache:3-D": _form(torch.zeros(2, 2, 2)), "cache:6-D": _form(torch.zeros(1, 2, 1, 1, 1, 1)),
    "out:dtype": _out("out", _other_float), "out:rows": _out("out", _one_more),
    "out:dim": _out("out", lambda t: torch.cat([t, t], 2)), "out:flat": _out("out", lambda t: t.flatten(1)),
    "out:list": _out("out", lambda t: t.tolist()), "out:meta": _out("out", lambda t: t.to("meta")),
    "lse:dtype": _out("lse", lambda t: t.half()), "lse:shape": _out("lse", lambda t: torch.cat([t, t], 1)),
    "lse:3-D": _out("lse", lambda t: t[None]), "lse:list": _out("lse", lambda t: t.tolist()),
    "scale:two": _anywhere(k_scale=torch.ones(2)), "scale:str": _anywhere(v_scale="1"),
    "scale:nan": _anywhere(k_scale=NAN), "scale:inf": _anywhere(v_scale=float("inf")),
    "scale:bool": _anywhere(q_scale=True), "scale:list": _anywhere(k_scale=[1.0]),
    "scale:meta": _anywhere(v_scale=torch.ones(1, device="meta")),
    "window": _planned_window, "sinks": _paged(sinks=torch.zeros(4)),
    "kv_cache_sf": _anywhere(kv_cache_sf=(torch.zeros(1), torch.zeros(1))),
    "unknown": _anywhere(frobnicate=1),
}  # fmt: skip
"""Wrong runs."""
