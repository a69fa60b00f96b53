from importlib.metadata import entry_points

import pytest
import torch

from attn_core import BatchDecodeWithPagedKVCacheWrapper, plugins


def _discover(**options):
    mine = [ep for ep in entry_points(group=plugins.GROUP) if ep.name == "echo"]
    assert len(mine) == 1
    return plugins.discover(mine, config={"echo": options} if options else {})


def _decode(backend):
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [0], [3])]
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, dtype=torch.uint8), backend=backend)
    wrapper.plan(*ints, 2, 1, 8, 4, q_data_type=torch.float32)
    return wrapper


@pytest.fixture
def installed(request):
    old = plugins.use(_discover(**getattr(request, "param", {})))
    yield
    plugins.use(old)


def test_is_discovered_with_its_source():
    found = _discover()
    assert found.broken == ()
    assert found.sources["echo"].startswith("attn-echo ")


def test_is_behind_everything_by_default():
    assert [b.name for b in _discover().backends][-1] == "echo"


@pytest.mark.usefixtures("installed")
def test_auto_does_not_choose_it():
    assert _decode("auto").backend == "reference"


@pytest.mark.usefixtures("installed")
def test_it_answers_when_named():
    assert _decode("echo").route.candidate == "echo/loop"


@pytest.mark.parametrize("installed", [{"rank": 900}], indirect=True)
@pytest.mark.usefixtures("installed")
def test_configuration_moves_it_ahead_of_the_reference():
    assert _decode("auto").route.candidate == "echo/loop"


@pytest.mark.parametrize("rank", ["900", None, True, 1.5])
def test_a_bad_option_breaks_the_plugin_and_nothing_else(rank):
    found = _discover(rank=rank)
    assert [b.name for b in found.backends] == ["reference"]
    assert found.broken == (
        plugins.Broken("echo", f"TypeError: echo: rank: needs an int, got {rank!r} [echo.rank]"),
    )
