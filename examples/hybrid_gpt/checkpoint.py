"""Checkpoints that any layout of the same model can be loaded from a folder of.

In: a trainer. Out: `FOLDER/step-00000100/` by torch.distributed.checkpoint, and `FOLDER/latest`
with that name, written last.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from trainer import Trainer

__all__ = ["load", "save"]


def _state(trainer: Trainer) -> dict[str, Any]:
    """{name: tensor}, the tensors being the training's own, with room made where it has none."""
    state: dict[str, Any] = {}
    for name, parameter in trainer.parameters.items():
        moments = trainer.optimizer.state[parameter]
        if not moments:
            moments["step"] = torch.zeros(())
            moments["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
            moments["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
        state[f"parameter.{name}"] = parameter.detach()
        state.update({f"{key}.{name}": value for key, value in moments.items()})
    return state


def save(trainer: Trainer, folder: Path, step: int) -> None:
    """All workers together, after `step` steps."""
    name = f"step-{step:08d}"
    save_state(_state(trainer), checkpoint_id=folder / name)
    if dist.get_rank() == 0:
        (folder / "latest.new").write_text(name, encoding="ascii")
        os.replace(folder / "latest.new", folder / "latest")
    dist.barrier()


def load(trainer: Trainer, folder: Path) -> int:
    """All workers together; the number of steps done, 0 where nothing was saved."""
    latest = folder / "latest"
    if not latest.exists():
        return 0
    name = latest.read_text(encoding="ascii")
    load_state(_state(trainer), checkpoint_id=folder / name)
    return int(name.removeprefix("step-"))
