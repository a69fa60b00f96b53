"""Every keyword a route passes exists in every release it serves, and nothing required is left out."""

from __future__ import annotations

import pytest

from attn_aiter import probe, rows
from attn_aiter.backend import AiterBackend
from attn_aiter.probe import AiterApi, Function
from attn_aiter.routes.common import Call, window_size

RELEASES = [api.text for api in probe.recordings()]
PATHS = list(rows.CAPABILITIES)


def backend_of(release: str) -> AiterBackend:
    return AiterBackend({"assume_version": release, "min_version": "0.1.0"})


def test_the_recorded_releases() -> None:
    assert RELEASES == ["0.1.7.post2.dev18", "0.1.10", "0.1.16", "0.1.20"]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("path", PATHS)
def test_every_path_binds(release: str, path: str) -> None:
    assert backend_of(release)._lacks(path) is None


def test_the_c_arguments_of_the_decode_kernel() -> None:
    lists = {api.pa_v1_arguments for api in probe.recordings()}
    assert len(lists) == 1
    assert len(next(iter(lists))) == 26


def changed(api: AiterApi, key: str, parameters: tuple[tuple[str, str | None], ...]) -> AiterApi:
    old = api.functions[key]
    functions = {**api.functions, key: Function(old.module, old.name, parameters)}
    return AiterApi(api.release, api.text, functions, api.pa_v1_arguments)


@pytest.mark.parametrize("key", ["batch_prefill", "varlen", "unified", "append", "pa_v1_compile"])
def test_a_renamed_parameter_is_found(key: str) -> None:
    backend = backend_of("0.1.20")
    route = next(r for r in (*backend._routes.values(), backend._append) if r.call.key == key)
    api = backend.api
    for name in route.call.passes:
        renamed = tuple((f"{n}_new" if n == name else n, d) for n, d in api.functions[key].parameters)
        missing = route.missing(changed(api, key, renamed))
        assert any(f"({name})" in text for text in missing), name


def test_a_new_required_parameter_is_found() -> None:
    backend = backend_of("0.1.20")
    more = (*backend.api.functions["varlen"].parameters, ("qk_norm", None))
    missing = backend._routes[rows.VARLEN].missing(changed(backend.api, "varlen", more))
    assert missing == ("flash_attn_varlen_func without qk_norm",)


def test_a_changed_c_argument_list_is_found() -> None:
    api = backend_of("0.1.20").api
    other = AiterApi(api.release, api.text, api.functions, (*api.pa_v1_arguments, "int more"))
    assert backend_of("0.1.20")._routes[rows.PA_V1].missing(other) == ("pa_v1 C arguments as recorded",)


def test_a_missing_function_is_found() -> None:
    api = backend_of("0.1.20").api
    functions = {key: value for key, value in api.functions.items() if key != "unified"}
    other = AiterApi(api.release, api.text, functions, api.pa_v1_arguments)
    assert backend_of("0.1.20")._routes[rows.UNIFIED].missing(other) == ("unified",)


def test_positions_differ_between_releases_where_names_do_not() -> None:
    """Why nothing is passed by position: index 16 and 18 mean something else one release later."""
    old, new = probe.recordings()[0], probe.recordings()[-1]
    assert old.functions["unified"].parameters[16][0] == "alibi_slopes"
    assert new.functions["unified"].parameters[16][0] == "q_scales"
    assert new.functions["batch_prefill"].parameters[18][0] == "kv_last_page_lens"


def test_optional_parameters_are_passed_where_they_are() -> None:
    call = Call("f", ("a",), ("b",))
    values: dict[str, object] = {"a": 1, "b": 2}
    assert call.bind(Function("m", "f", (("a", None), ("b", "0"))), values) == values
    assert call.bind(Function("m", "f", (("a", None),)), values) == {"a": 1}


def test_the_window_is_as_long_as_the_releases(problem) -> None:
    from attn_core.problem import MaskMode, Op

    short = Function("m", "f", (("window_size", "(-1, -1)"),))
    long = Function("m", "f", (("window_size", "(-1, -1, 0)"),))
    p = problem(Op.PREFILL_RAGGED, window_left=31)
    assert window_size(p, short) == (31, 0)
    assert window_size(p, long) == (31, 0, 0)
    assert window_size(problem(Op.PREFILL_RAGGED), long) == (-1, -1, 0)
    right_open = problem(Op.PREFILL_RAGGED, window_left=31, mask=MaskMode.NONE)
    assert window_size(right_open, short) == (31, -1)
