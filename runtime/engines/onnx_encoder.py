"""The engine of encoders exported to ONNX; see `runtime.engines.base.EncoderEngine`."""

from __future__ import annotations

import torch

from runtime.engines.onnx_session import DTYPES, Session, file_bytes, session_entries
from runtime.exported import Export


class OnnxEncoderEngine:
    """Runs `model.onnx`."""

    def __init__(self, export: Export, device: torch.device, kernels: str, threads: int | None) -> None:
        facts = export.facts
        self.device = device
        self.vocab_size = int(facts["vocab_size"])
        self.hidden_size = int(facts["hidden_size"])
        limit = facts.get("context_length")
        self.context_length: int | None = None if limit is None else int(limit)
        self._dtype = DTYPES[facts["dtype"]]
        self.weight_bytes = file_bytes(export)
        self._session = Session(export.path / "model.onnx", device, kernels, threads, session_entries(facts))
        self.description = self._session.description

    @torch.inference_mode()
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        states = torch.empty(*input_ids.shape, self.hidden_size, dtype=self._dtype, device=self.device)
        inputs = {"input_ids": input_ids, "attention_mask": mask.to(torch.int64)}
        inputs["token_type_ids"] = torch.zeros_like(input_ids)
        self._session.run(inputs, {"last_hidden_state": states})
        return states.float()

    def explain(self) -> dict[str, str]:
        """{graph: what computes it}; ONNX Runtime does not tell more."""
        return {"model.onnx": self.description}
