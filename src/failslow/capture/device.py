"""Which device this thread computes on, for the agent: asked only where CUDA is in use already.

In: torch's current CUDA device. Out: plain values, {} where the process has not set CUDA up (then
its device is the host's processor, as far as anybody knows):

    {"id":"GPU-5fd4f087-86f3-5d43-b01a-e80dc5ab7ee2","model":"NVIDIA H200"}

The index would not do: processes see the devices of their machine under numbers of their own. Not
run on GPUs yet: tested with stand-ins for torch's properties of a device.
"""

from __future__ import annotations

from typing import Any

__all__ = ["current_device", "device_id"]


def current_device() -> dict[str, str]:
    """Sets nothing up."""
    import torch

    cuda: Any = torch.cuda  # untyped
    if not cuda.is_initialized():
        return {}
    properties = cuda.get_device_properties(cuda.current_device())
    return {"id": device_id(properties), "model": str(properties.name)}


def device_id(properties: Any) -> str:
    """The UUID, or where torch does not tell it, the place on the PCI bus; "" unknown."""
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        return f"GPU-{uuid}"
    bus = getattr(properties, "pci_bus_id", None)
    if bus is None:
        return ""
    domain, device = (getattr(properties, f"pci_{part}_id", 0) for part in ("domain", "device"))
    return f"{domain:08x}:{bus:02x}:{device:02x}"
