"""Devices as arguments: named on any machine, described on this one."""

import dataclasses
import os
from types import SimpleNamespace

import pytest
import torch

from attn_core import target as module
from attn_core.target import DeviceTarget, parse_target, target_of

MI300X = DeviceTarget("hip", "gfx942", 304, 64)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("gfx942", DeviceTarget("hip", "gfx942", 0, 64)),
        (" GFX942 ", DeviceTarget("hip", "gfx942", 0, 64)),
        ("gfx950:256", DeviceTarget("hip", "gfx950", 256, 64)),
        ("gfx90a", DeviceTarget("hip", "gfx90a", 0, 64)),
        ("gfx1100", DeviceTarget("hip", "gfx1100", 0, 32)),
        ("sm_90", DeviceTarget("cuda", "sm_90", 0, 32)),
        ("sm_90a:132", DeviceTarget("cuda", "sm_90a", 132, 32)),
        ("cpu:8", DeviceTarget("cpu", "cpu", 8, 1)),
        ("cpu", DeviceTarget("cpu", "cpu", os.cpu_count(), 1)),
    ],
)
def test_names(text, want):
    assert parse_target(text) == want


@pytest.mark.parametrize(
    "text", ["", "gfx", "gfx9", "sm_", "sm_x", "sm90", "mi300x", ":304", "cuda", "gpu:1"]
)
def test_what_is_no_name(text):
    with pytest.raises(ValueError, match=r"arch: needs 'cpu', 'gfx...' or 'sm_...'"):
        parse_target(text)


@pytest.mark.parametrize("text", ["gfx942:0", "gfx942:-1", "gfx942:x", "cpu:1.5", "gfx942:304:1"])
def test_what_is_no_count(text):
    with pytest.raises(ValueError, match="arch: needs a positive compute unit count"):
        parse_target(text)


def test_packages_supply_what_is_not_stated():
    assert parse_target("gfx942", [MI300X]) == MI300X
    assert parse_target("gfx942:38", [MI300X]) == dataclasses.replace(MI300X, num_cus=38)
    assert parse_target("gfx950", [MI300X]).num_cus == 0
    odd = DeviceTarget("npu", "weird", 3, 8)
    assert parse_target("weird", [MI300X, odd]) == odd


def test_text():
    assert str(DeviceTarget("cpu", "cpu", 2, 1)) == "cpu"
    assert str(dataclasses.replace(MI300X, index=3)) == "hip:3 (gfx942)"


def test_devices_without_a_driver_are_described_by_their_type():
    assert target_of(torch.device("cpu")) == DeviceTarget("cpu", "cpu", os.cpu_count(), 1)
    assert target_of(torch.device("meta")) == DeviceTarget("meta", "meta")


@pytest.fixture
def cards(monkeypatch):
    """Two unlike cards in one machine; ``cards(hip)`` says what torch was built for."""

    def install(hip):
        properties = [
            SimpleNamespace(
                multi_processor_count=304,
                warp_size=64,
                gcnArchName="gfx942:sramecc+:xnack-",
                major=9,
                minor=4,
            ),
            SimpleNamespace(multi_processor_count=256, gcnArchName="gfx950", major=9, minor=0),
        ]
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)

    module._gpu.cache_clear()
    yield install
    module._gpu.cache_clear()


def test_amd_cards_by_ordinal(cards):
    cards("7.0")
    assert target_of(torch.device("cuda", 0)) == MI300X
    assert target_of(torch.device("cuda", 1)) == DeviceTarget("hip", "gfx950", 256, 64, 1)
    assert target_of(torch.device("cuda")) == target_of(torch.device("cuda", 1))


def test_other_cards_by_capability(cards):
    cards(None)
    assert target_of(torch.device("cuda", 0)) == DeviceTarget("cuda", "sm_94", 304, 64, 0)
    assert target_of(torch.device("cuda", 1)) == DeviceTarget("cuda", "sm_90", 256, 32, 1)
