"""Which device a worker computes on: told where CUDA is in use, and never by setting it up.

No GPU is used: torch's answers are stand-ins, with the fields that torch's own have.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="a device is torch's")

import torch
from ring_writer import make

from failslow.capture import layout
from failslow.capture.device import current_device, device_id
from failslow.capture.reader import RingReader

UUID = "5fd4f087-86f3-5d43-b01a-e80dc5ab7ee2"


def stand_in(monkeypatch: pytest.MonkeyPatch, *, used: bool, **properties: Any) -> list[str]:
    """Of torch.cuda; returns what was asked for that sets CUDA up where it is not."""
    asked: list[str] = []

    def answer(name: str, value: object) -> Any:
        def call(*_: object) -> object:
            asked.append(name)
            return value

        return call

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(torch.cuda, "current_device", answer("current_device", 3))
    found = SimpleNamespace(name="NVIDIA H200", **properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", answer("properties", found))
    return asked


def test_a_process_that_has_not_set_cuda_up_is_not_made_to(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = stand_in(monkeypatch, used=False, uuid=UUID)
    assert current_device() == {}
    assert asked == []


def test_the_device_of_this_thread_is_told_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, used=True, uuid=UUID)
    assert current_device() == {"id": f"GPU-{UUID}", "model": "NVIDIA H200"}


@pytest.mark.parametrize(
    ("properties", "name"),
    [
        ({"pci_bus_id": 0x1B, "pci_device_id": 0, "pci_domain_id": 0}, "00000000:1b:00"),
        ({}, ""),  # an older torch
    ],
)
def test_without_a_uuid_its_place_on_the_bus_tells(properties: dict[str, int], name: str) -> None:
    assert device_id(SimpleNamespace(name="NVIDIA H200", **properties)) == name


def test_what_is_told_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    writer = make(tmp_path)
    reader = RingReader(writer.path)
    assert reader.device() == {}
    writer.tell_device({})
    assert reader.device() == {}
    about = {"id": f"GPU-{UUID}", "model": "NVIDIA H200"}
    writer.tell_device(about)
    assert reader.device() == about
    writer.tell_device({"id": "x" * 1000})  # no room: what was told before stays
    assert reader.device() == about
    assert reader.description["rank"] == 0
    layout.U64.pack_into(writer.memory, layout.OFFSET_DEVICE, 10)  # its writer is at it
    assert reader.device() == {}
