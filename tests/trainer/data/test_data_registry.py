"""The registry of sources: names, errors for wrong names, and the checks of batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from data_samples import config_of, source_of

from trainer.data import jagged_batch, one_id_batch
from trainer.data.sources.synthetic import SyntheticSource
from trainer.errors import UserError

MODULE = """
import torch
from trainer.data import one_id_batch

class Good:
    samples_per_epoch = 3
    def __init__(self, context):
        self.config, self.split = context.config, context.split
    def read(self, position, count):
        value = self.config.data.options["value"]
        ids = torch.full((len(self.config.data.sparse_features), count), self.config.data.options["id"])
        dense = torch.full((count, len(self.config.data.dense_features)), float(value))
        return one_id_batch(self.config.data.sparse_features, self.config.rows_per_table, dense, ids, torch.zeros(count), position)

class NoRead:
    samples_per_epoch = 3
    def __init__(self, context): ...
"""  # noqa: E501


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put modules of a user on the import path."""
    (tmp_path / "users_package").mkdir()
    (tmp_path / "users_package" / "users_source.py").write_text(MODULE)
    (tmp_path / "needs_more.py").write_text("import a_library_that_is_not_installed")
    monkeypatch.syspath_prepend(str(tmp_path))


def failure(name: str, **options: object) -> str:
    with pytest.raises(UserError) as caught:
        source_of(config_of({"source": name, "options": options})).read(10, 4)
    return str(caught.value)


def test_the_default_source_is_synthetic() -> None:
    assert isinstance(source_of(config_of({})), SyntheticSource)


def test_a_class_gets_the_configuration_and_its_own_options() -> None:
    config = config_of({"source": "users_package.users_source:Good", "options": {"value": 7, "id": 1}})
    assert source_of(config, "eval").read(0, 2).dense_BD[0, 0] == 7


def test_a_module_that_cannot_be_imported_is_named() -> None:
    assert failure("users_package.other:Good") == (
        "data.source users_package.other:Good: cannot import users_package.other "
        "(No module named 'users_package.other'). Fix: add its folder to PYTHONPATH"
    )


def test_a_library_that_the_module_lacks_is_named() -> None:
    assert "(No module named 'a_library_that_is_not_installed')" in failure("needs_more:Good")


def test_a_class_that_the_module_lacks_is_named() -> None:
    assert failure("users_package.users_source:Other") == (
        "data.source users_package.users_source:Other: module users_package.users_source has no Other"
    )


def test_a_class_without_read_is_refused() -> None:
    assert failure("users_package.users_source:NoRead") == (
        "data.source users_package.users_source:NoRead: the object lacks read() or samples_per_epoch. "
        "Fix: implement the protocol trainer.data.Source"
    )


def test_an_id_of_a_user_class_is_checked_too() -> None:
    assert failure("users_package.users_source:Good", value=0, id=1_000).startswith(
        "feature cat_0 has an id outside its table t_cat_0 of 1000 rows in sample 10: got 1000; allowed: 0 to 999."
    )


def test_a_label_of_a_user_batch_is_checked_too() -> None:
    labels = torch.tensor([0.0, float("nan")])
    with pytest.raises(UserError, match="wrong label in sample 41: got nan; allowed: 0, 1 or a probability between"):
        one_id_batch(["f"], [5], torch.zeros(2, 1), torch.zeros(1, 2, dtype=torch.int64), labels, 40)


def test_an_id_of_a_jagged_batch_is_named_with_its_sample() -> None:
    values, lengths = torch.tensor([1, 2, 9, 3]), torch.tensor([2, 0, 1, 1])
    with pytest.raises(UserError, match="feature f has an id outside its table t_f of 5 rows in sample 42: got 9"):
        jagged_batch(["f"], [5], torch.zeros(4, 1), [values], [lengths], torch.zeros(4), 40)


def test_a_jagged_batch_may_have_no_ids_at_all() -> None:
    nothing, lengths = torch.zeros(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    batch = jagged_batch(["f"], [5], torch.zeros(2, 1), [nothing], [lengths], torch.zeros(2), 0)
    assert batch.sparse["f"].values().numel() == 0


def test_all_tensors_of_a_batch_move_to_a_device() -> None:
    batch = one_id_batch(["f"], [5], torch.zeros(2, 1), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(2), 0)
    batch.weights_B = torch.ones(2)
    moved = batch.to(torch.device("meta"))
    assert moved.weights_B is not None
    tensors = (moved.dense_BD, moved.sparse.values(), moved.sparse.lengths(), moved.labels_B, moved.weights_B)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
