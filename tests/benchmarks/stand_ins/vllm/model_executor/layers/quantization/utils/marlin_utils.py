"""Workspace of Marlin."""

import torch


def marlin_make_workspace_new(device: torch.device) -> torch.Tensor:
    return torch.zeros(132, dtype=torch.int32, device=device)
