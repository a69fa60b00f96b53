"""The public surface of FlashInfer 0.6.18: every name is here with its parameters, or is refused by name."""

from __future__ import annotations

import functools
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import attn_core
from attn_core.not_here import NAMES
from attn_core.page import append_paged_kv_cache

LINES = [
    line
    for line in Path(__file__).with_name("upstream_api.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]
OURS = {"needs_lse", "max_seq_len", "backend", "q_data_type", "kv_data_type"}
"""Keywords that are new here; they come last or by keyword only."""
STAND_INS = {"__git_commit__", "__git_version__", "autotune", "next_positive_power_of_2"}
"""Names of the top level that the alias alone has."""

DEVICE = {"device='cuda'": "device=None"}
"""The one other default: None is the GPU where there is one."""


def split(line: str) -> tuple[str, list[str], str]:
    path, rest = re.match(r"([\w.]+) ?(.*)", line).groups()
    return path.split(".")[0], path.split(".")[1:], rest


def found(module: str, names: list[str]) -> object:
    where = import_module(f"attn_core.{module}") if module else attn_core
    return functools.reduce(getattr, names, where)


def written(parameters: list[inspect.Parameter]) -> list[str]:
    """Write parameters as the data has them."""
    texts, starred = [], False
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL:
            texts.append("*args")
            starred = True
            continue
        if p.kind is p.KEYWORD_ONLY and not starred:
            texts.append("*")
            starred = True
        name = "**kwargs" if p.kind is p.VAR_KEYWORD else p.name
        texts.append(name if p.default is p.empty else f"{name}={p.default!r}")
    return texts


REFUSED = [line for line in LINES if (split(line)[1][-1] in NAMES.get(split(line)[0], ()))]
HERE = [line for line in LINES if line.endswith(")")]
OTHERS = [line for line in LINES if line not in REFUSED and line not in HERE]


@pytest.mark.parametrize("line", HERE, ids=lambda line: line.partition("(")[0])
def test_parameters_order_and_defaults(line):
    module, names, rest = split(line)
    got = found(module, names)
    parameters = list(inspect.signature(got).parameters.values())
    if len(names) == 2:
        parameters = parameters[1:]  # self
    wanted = re.split(r", (?![^(\[]*[)\]])", rest[1:-1]) if rest != "()" else []
    theirs = {re.match(r"\**(\w*)", text)[1] for text in wanted}
    ours = written([p for p in parameters if p.name in theirs or p.name not in OURS])
    assert ours == [DEVICE.get(text, re.sub(r"^\*\w+", "*args", text)) for text in wanted]
    more = [p for p in parameters if p.name in OURS and p.name not in theirs]
    assert parameters[len(parameters) - len(more) :] == more or all(p.kind is p.KEYWORD_ONLY for p in more)


@pytest.mark.parametrize("line", OTHERS)
def test_names_are_there(line):
    module, names, _ = split(line)
    if not module and names[0] in STAND_INS:
        return  # see test_every_name_is_found_under_the_alias
    assert found(module, names) is not None


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_not_here_is_refused_by_name(line):
    module, names, _ = split(line)
    there = find_alias(module, names)
    with pytest.raises(NotImplementedError, match=rf"^{names[0]}: needs .* \[core.not-here\]"):
        there(torch.empty(1))


def find_alias(module: str, names: list[str]) -> object:
    """Return what the alias finds: modules that have nothing but refused names are nowhere else."""
    from attn_core.not_here import refusing

    return refusing(module, names[0])


ALIAS = """
import sys
from importlib import import_module
from attn_core.compat import install
install()
for line in sys.stdin.read().split():
    module, _, name = line.partition(".")
    where = import_module("flashinfer." + module if module else "flashinfer")
    there = getattr(where, name)
    assert callable(there) or not isinstance(there, type(sys)), line
"""


def test_every_name_is_found_under_the_alias():
    names = [".".join([split(line)[0], split(line)[1][0]]) for line in LINES]
    done = subprocess.run(
        [sys.executable, "-c", ALIAS], input="\n".join(names), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_data_covers_what_is_public_here():
    top = {split(line)[1][0] for line in LINES if line.startswith(".")}
    ours = {"CacheView", "DecodePlanPool", "NoRoute", "Unsupported", "configure"}
    assert set(attn_core.__all__) - ours <= top
    assert len(HERE) > 60
    assert len(REFUSED) > 100
    assert append_paged_kv_cache.__name__ in {split(line)[1][0] for line in HERE}


def test_a_refused_class_is_fit_for_isinstance_and_no_more():
    refused = attn_core.BatchDecodeMlaWithPagedKVCacheWrapper
    assert not isinstance(3, refused)
    with pytest.raises(NotImplementedError, match=r"^BatchDecodeMlaWithPagedKVCacheWrapper.run: needs"):
        refused.run(1)
    with pytest.raises(AttributeError, match="_hidden"):
        _ = refused._hidden
