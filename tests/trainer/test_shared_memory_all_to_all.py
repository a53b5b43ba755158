"""The shared-memory all-to-all trains the same as gloo, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_jobs import alone, run_workers, same, tiny

from trainer.errors import UserError
from trainer.sharding.sharded_model import build_sharded_model


@pytest.fixture(scope="module", params=[2, 3])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the results of its worker; three processes divide gradients by a number that is not a power of two."""
    return run_workers("shared_memory_all_to_all", request.param, tmp_path_factory.mktemp("all-to-all"))


def result(folder: Path, name: str) -> dict[str, Any]:
    return torch.load(folder / f"{name}.pt", weights_only=False)


@pytest.mark.parametrize("plan", ["table_wise", "column_wise", "mixed"])
def test_shared_memory_trains_the_same_to_the_last_bit(plan: str, trained: Path) -> None:
    by_gloo, shared, auto = (result(trained, f"{plan}-{kind}") for kind in ("collective", "shared_memory", "auto"))
    assert (by_gloo["fast"]["exchange"], shared["fast"]["exchange"]) == ("collective", "shared_memory")
    assert auto["fast"]["exchange"] == "shared_memory", "auto must use shared memory if it is available"
    for found in (shared, auto):
        assert found["losses"] == by_gloo["losses"]
        assert torch.equal(found["logits"], by_gloo["logits"]), "an evaluation differs"
        assert same(found["end"], by_gloo["end"]) == []
    assert len(set(by_gloo["losses"])) == 10, "nothing was trained"


def test_a_lower_precision_uses_the_collective_and_reports_why(trained: Path) -> None:
    reason = (trained / "quantised-auto.txt").read_text(encoding="utf-8")
    assert reason == "collective: sharding.forward_precision and backward_precision are fp16 and fp32, not fp32"
    error = (trained / "quantised-shared_memory.txt").read_text(encoding="utf-8")
    assert error.startswith("sharding.exchange is shared_memory, but sharding.forward_precision")
    assert error.endswith("allowed: auto, collective")


def test_one_process_cannot_use_shared_memory() -> None:
    config = tiny()
    with alone(config) as runtime:
        assert build_sharded_model(config, runtime).resolved["exchange"] == "none"
    config = tiny({"sharding.exchange": "shared_memory"})
    with (
        pytest.raises(UserError, match=r"sharding\.exchange is shared_memory, but there is one process; allowed"),
        alone(config) as runtime,
    ):
        build_sharded_model(config, runtime)
