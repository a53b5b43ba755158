"""A trained model on one process, without a process group: out of a checkpoint, into a folder, and back for
predictions.

An exported folder holds `model.json` (configuration, quantisation, where it came from) and `weights.pt` (tensors only).
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

Quantize = Literal["none", "fp16", "int8"]
_TYPES = {"fp16": torch.float16, "int8": torch.qint8}
_DENSE, _TABLES = "dense.model.", "tables."
FORMAT = 1


@dataclass(frozen=True)
class ExportedModel:
    """A model ready to predict."""

    config: TrainConfig
    quantize: Quantize
    step: int
    model: Dlrm

    @torch.inference_mode()
    def predict(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Dense features (B, num_dense) and F sparse features -> probabilities (B)."""
        return torch.sigmoid(self.model(dense, sparse))


def from_checkpoint(store: CheckpointStore, step: int, quantize: Quantize = "none") -> ExportedModel:
    """Read a complete checkpoint into a plain model, whatever processes and plan wrote it."""
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
    return ExportedModel(config, quantize, int(marker["step"]), _quantized(model, quantize))


def save(exported: ExportedModel, folder: Path) -> None:
    """Write the model; `model.json` comes last, so a folder that has it is whole."""
    description = folder / "model.json"
    if description.exists():
        raise UserError(f"--out {folder} already holds a model; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(exported.model.state_dict(), folder / "weights.pt")
    fields = {
        "format": FORMAT,
        "step": exported.step,
        "quantize": exported.quantize,
        "config": exported.config.model_dump(mode="json"),
    }
    aside = folder / "model.json.part"
    aside.write_text(json.dumps(fields, indent=1), encoding="utf-8")
    aside.replace(description)


def load(folder: Path) -> ExportedModel:
    """Read a folder that `save` wrote; raises UserError for anything else."""
    try:
        fields: dict[str, Any] = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        if fields["format"] != FORMAT:
            raise UserError(f"--model {folder}: format {fields['format']}; this version reads format {FORMAT}")
        config = TrainConfig.model_validate(fields["config"])
        model = _quantized(Dlrm(config, "fp32", torch.device("cpu")).eval(), fields["quantize"])
        model.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
    except FileNotFoundError as error:
        raise UserError(
            f"--model {folder}: {Path(error.filename).name} is missing; make it with `python -m trainer export`"
        ) from None
    except (KeyError, TypeError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"--model {folder} is not a model that this version can read ({type(error).__name__})"
        ) from error
    return ExportedModel(config, fields["quantize"], int(fields["step"]), model)


def _quantized(model: Dlrm, quantize: Quantize) -> Dlrm:
    if quantize != "none":
        quantize_embeddings(model, dtype=_TYPES[quantize], inplace=True)
    return model
