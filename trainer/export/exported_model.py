"""A trained model for one process without a process group: read from a checkpoint, saved to a folder, loaded again.

The folder has `model.json` (configuration, quantization, step of the checkpoint) and `weights.pt` (tensors only).
"""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torchrec.inference.modules import quantize_embeddings
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from trainer.checkpoint import CheckpointStore
from trainer.config import TrainConfig
from trainer.errors import UserError
from trainer.model.dlrm import Dlrm
from trainer.storage.atomic_write import write_json

Quantize = Literal["none", "fp16", "int8"]
_TYPES = {"fp16": torch.float16, "int8": torch.qint8}
_DENSE, _TABLES = "dense.model.", "tables."
FORMAT = 1


@dataclass(frozen=True)
class ExportedModel:
    """A model that can predict."""

    config: TrainConfig
    quantize: Quantize
    step: int
    model: Dlrm

    @torch.inference_mode()
    def predict(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Return probabilities (B) from dense features (B, num_dense) and F sparse features."""
        return torch.sigmoid(self.model(dense, sparse))


def from_checkpoint(store: CheckpointStore, step: int, quantize: Quantize = "none") -> ExportedModel:
    """Read a complete checkpoint, written by any number of processes with any plan, into an unsharded model."""
    marker = store.read_marker(step)
    config = TrainConfig.model_validate(marker["config"])
    model = Dlrm(config, "fp32", torch.device("cpu")).eval()
    targets: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.startswith("embeddings.embedding_bags."):
            targets[_TABLES + name.removeprefix("embeddings.embedding_bags.")] = tensor
        else:
            targets[_DENSE + name] = tensor
    try:
        dcp.load(targets, storage_reader=store.reader(step), no_dist=True)
    except (dcp.CheckpointException, OSError, RuntimeError) as error:
        raise UserError(f"checkpoint {store.location(step)} cannot be read: {type(error).__name__}") from error
    return ExportedModel(config, quantize, int(marker["step"]), _quantize(model, quantize))


def save(exported: ExportedModel, folder: Path) -> None:
    """Write the model; `model.json` is written last, so a folder that has it is complete."""
    description = folder / "model.json"
    if description.exists():
        raise UserError(f"--out {folder} already contains a model. Fix: choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(exported.model.state_dict(), folder / "weights.pt")
    fields = {
        "format": FORMAT,
        "step": exported.step,
        "quantize": exported.quantize,
        "config": exported.config.model_dump(mode="json"),
    }
    write_json(description, fields)


def load(folder: Path) -> ExportedModel:
    """Load a folder that `save` wrote; raise UserError for anything else."""
    try:
        fields: dict[str, Any] = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        if fields["format"] != FORMAT:
            raise UserError(f"--model {folder} has an unknown format: got {fields['format']}; allowed: {FORMAT}")
        config = TrainConfig.model_validate(fields["config"])
        model = _quantize(Dlrm(config, "fp32", torch.device("cpu")).eval(), fields["quantize"])
        model.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
    except FileNotFoundError as error:
        raise UserError(
            f"--model {folder}: {Path(error.filename).name} is missing. Fix: create it with `python -m trainer export`"
        ) from None
    except (KeyError, TypeError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"--model {folder} is not a model that this version can read ({type(error).__name__})"
        ) from error
    return ExportedModel(config, fields["quantize"], int(fields["step"]), model)


def _quantize(model: Dlrm, quantize: Quantize) -> Dlrm:
    """Quantize the embeddings in place and return the model."""
    if quantize != "none":
        quantize_embeddings(model, dtype=_TYPES[quantize], inplace=True)
    return model
