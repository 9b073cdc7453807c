"""Where this worker runs, for `localize.script.WorkerPlace`.

In: the process's device and environment. Out: plain JSON, to be sent to who plans:

    {"rank":5,"node":"gpu-17","host":"8c1f…","device":"NVIDIA H200","device_id":"GPU-5fd4f087-…",
     "nic":"eth0"}
"""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path
from typing import Any

import torch

from failslow.capture.device import device_id

__all__ = ["describe_place", "device_model"]


def describe_place(rank: int, device: torch.device, *, node: str = "") -> dict[str, Any]:
    """The fields of a WorkerPlace. node: what the job takes for a host; "" = the host name."""
    on_cuda = device.type == "cuda"
    # one interface named for all traffic is known; several, or a pattern, are not
    names = os.environ.get("NCCL_SOCKET_IFNAME" if on_cuda else "GLOO_SOCKET_IFNAME", "")
    return {
        "rank": rank,
        "node": node or socket.gethostname(),
        "host": _boot_id(),
        "device": device_model(device),
        "device_id": device_id(torch.cuda.get_device_properties(device)) if on_cuda else "",
        "nic": names if names.replace(".", "").isalnum() and not on_cuda else "",
    }


def device_model(device: torch.device) -> str:
    """ "NVIDIA H200", "cpu Intel(R) Xeon(R) Processor", "cpu"."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type != "cpu":
        return device.type
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"cpu {line.split(':', 1)[1].strip()}"
    except OSError:
        pass
    return f"cpu {platform.machine()}".strip()


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
