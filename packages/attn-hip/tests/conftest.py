"""What the tests share: one thread, and the native module as the backend loads it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_hip import driver, toolchain
from attn_hip.host import Host

from . import mockhip


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def builds(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Name the folder in which workers share what they compile."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "amd-builds"
    folder.mkdir(exist_ok=True)
    os.environ["ATTN_TEST_BUILDS"] = os.fspath(folder)


@pytest.fixture(scope="session")
def native() -> Any:
    host = Host()
    assert host.prepare() is None
    return host.module()


@pytest.fixture(scope="session")
def mock_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    made = tmp_path_factory.mktemp("mockhip") / "libamdhip64.so"
    flags = ["-O1", "-Wall", "-Werror", "-Wno-stringop-truncation", "-fPIC", "-shared"]
    subprocess.run([compiler, *flags, "-o", str(made), str(mockhip.HERE / "mockhip.c")], check=True)
    return made


@pytest.fixture
def mock(
    request: pytest.FixtureRequest, mock_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> mockhip.Mock:
    """The runtime of the arch that the test is parametrised with, gfx942 by default."""
    pytest.importorskip("numpy")
    arch = getattr(request, "param", "gfx942")
    try:
        toolchain.find(arch)
    except toolchain.NoCompiler as err:
        pytest.skip(str(err))
    # A library of its own for every test: the driver is remembered by its path.
    library = tmp_path / "libamdhip64.so"
    shutil.copy(mock_library, library)
    monkeypatch.setenv(driver.RUNTIME_VARIABLE, os.fspath(library))
    return mockhip.Mock(library, arch)


@pytest.fixture(scope="session")
def device(native: Any) -> Callable[[str, str], Any]:
    from .device import Device, has  # needs numpy, which the rest does not

    made: dict[tuple[str, str], Device] = {}

    def of(arch: str, compiler: str) -> Any:
        if not has(arch, compiler):
            pytest.skip(f"{compiler} for {arch} is not here")
        if (arch, compiler) not in made:
            made[arch, compiler] = Device(native, arch, compiler)
        return made[arch, compiler]

    return of
