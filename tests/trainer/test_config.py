"""The tree of options: the sources of a value, derived values, and the absence of heavy imports."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.config import CRITEO_1TB_ROWS, TrainConfig, leaves
from trainer.config.options import env_name, load_config, option_name
from trainer.help import command_help

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden" / "options.txt"
HEAVY = ("torch", "torchrec", "fbgemm_gpu", "numpy", "pandas", "polars", "pyarrow", "fsspec", "tensorboard", "rich")


def run_python(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRAINER_")} | (env or {})
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)


# --- the list of options ---------------------------------------------------------------------------------------------


def listed_options() -> str:
    """Return every option with its type and default, one per line, as `train --help` prints them."""
    lines = command_help("train", "").splitlines()
    found = []
    for name, meaning in itertools.pairwise(lines):
        if name.startswith("  --") and not name.startswith("  --config"):
            found.append(f"{name.strip()} {meaning[meaning.rindex(' [') + 1 :]}")
    return "\n".join(found) + "\n"


def test_the_options_equal_the_golden_list() -> None:
    if os.environ.get("REWRITE_GOLDEN") == "1":
        GOLDEN.write_text(listed_options(), encoding="utf-8")
    assert listed_options() == GOLDEN.read_text(encoding="utf-8"), (
        "an option was added, removed, renamed or has another default, so files and scripts do something else; "
        "if that is intended, run with REWRITE_GOLDEN=1 and read the difference in review"
    )


def test_the_golden_list_has_a_line_for_every_option() -> None:
    names = [line.split()[0] for line in GOLDEN.read_text(encoding="utf-8").splitlines()]
    assert names == ["--" + option_name(path) for path in leaves()], "a change of a missing option would go unnoticed"


def test_every_option_has_a_description() -> None:
    undescribed = [option_name(path) for path, field in leaves().items() if not field.description]
    assert not undescribed, "the help and the schema do not explain these options"


# --- sources of a value ----------------------------------------------------------------------------------------------

FILES = {
    "config.json": '{"train": {"batch_size": 64, "steps": 7}, '
    '"model": {"num_embeddings": [9, 8]}, "data": {"num_sparse": 2}}',
    "config.toml": "[train]\nbatch_size = 64\nsteps = 7\n[model]\nnum_embeddings = [9, 8]\n[data]\nnum_sparse = 2\n",
    "config.yaml": "train: {batch_size: 64, steps: 7}\nmodel: {num_embeddings: [9, 8]}\ndata: {num_sparse: 2}\n",
    "config.yml": "train:\n  batch_size: 64\n  steps: 7\nmodel:\n  num_embeddings: [9, 8]\ndata:\n  num_sparse: 2\n",
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_each_kind_gives_the_same_configuration(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FILES[name], encoding="utf-8")
    config = load_config(["--config", str(tmp_path / name)], {})
    assert (config.train.batch_size, config.train.steps) == (64, 7), "the file's values are ignored"
    assert config.rows_per_table == (9, 8), "the file's list is ignored"
    assert config.train.seed == TrainConfig().train.seed, "an option that is not in the file keeps its default"


def test_the_command_line_overrides_the_environment_which_overrides_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"train": {"batch_size": 2, "steps": 2, "seed": 2}}', encoding="utf-8")
    environ = {"TRAINER_TRAIN__BATCH_SIZE": "3", "TRAINER_TRAIN__STEPS": "3"}
    train = load_config(["--config", str(file), "--train.batch-size", "4"], environ).train
    assert train.batch_size == 4, "the command line overrides everything"
    assert train.steps == 3, "the environment overrides the file"
    assert train.seed == 2, "the file overrides the default"
    assert train.eval_every == 0, "an option without a value has its default"


def test_the_last_of_two_values_on_the_command_line_wins() -> None:
    assert load_config(["--train.steps", "3", "--train.steps", "4"], {}).train.steps == 4


@pytest.mark.parametrize(
    "arguments", [["--train.batch-size", "8"], ["--train.batch-size=8"], ["--train.batch_size", "8"]]
)
def test_an_option_may_be_written_with_a_space_an_equals_sign_or_underscores(arguments: list[str]) -> None:
    assert load_config(arguments, {}).train.batch_size == 8


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"train": {"steps": 5}}', encoding="utf-8")
    (tmp_path / "b.json").write_text('{"train": {"steps": 6}}', encoding="utf-8")
    environ = {"TRAINER_CONFIG": str(tmp_path / "a.json")}
    assert load_config([], environ).train.steps == 5, "TRAINER_CONFIG was not read"
    steps = load_config(["--config", str(tmp_path / "b.json")], environ).train.steps
    assert steps == 6, "--config overrides TRAINER_CONFIG"


def test_every_option_can_be_set_by_its_environment_variable_and_by_the_command_line() -> None:
    for path in leaves():
        value = getattr_path(TrainConfig(), path)
        text = value if isinstance(value, str) else json.dumps(value)
        for arguments, environ in (([f"--{option_name(path)}={text}"], {}), ([], {env_name(path): text})):
            assert load_config(arguments, environ) == TrainConfig(), (
                f"{option_name(path)} does not accept its own default"
            )


def getattr_path(config: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        config = getattr(config, name)
    return config


@pytest.mark.parametrize("text", ["2024", "true", "1e5", "007"])
def test_a_text_option_accepts_text_that_looks_like_a_number(text: str) -> None:
    assert load_config(["--train.run", text], {}).train.run == text, "a run may be named after a year"
    assert load_config([], {"TRAINER_DATA__PATH": text}).data.path == text


def test_none_clears_an_option(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"train": {"steps": 5}, "data": {"path": "x"}}', encoding="utf-8")
    config = load_config(["--config", str(tmp_path / "c.json"), "--train.steps", "none", "--data.path", "none"], {})
    assert config.train.steps is None
    assert config.data.path is None


# --- derived values --------------------------------------------------------------------------------------------------


def test_the_criteo_preset_has_the_26_published_sizes_and_the_cap_limits_them() -> None:
    preset = ["--model.num-embeddings", "criteo-1tb"]
    rows = load_config(preset, {}).rows_per_table
    assert (len(rows), sum(rows)) == (26, 204_184_588), "MLPerf's DLRM has 204 M rows at the 40 M cap"
    capped = load_config([*preset, "--model.num-embeddings-cap", "1000"], {}).rows_per_table
    assert capped == tuple(min(r, 1000) for r in CRITEO_1TB_ROWS), "the cap never enlarges a table"


def test_the_rows_of_a_parquet_column_override_the_common_number() -> None:
    config = TrainConfig.model_validate(
        {
            "data": {
                "source": "parquet",
                "path": "x",
                "parquet": {"dense": ["d"], "sparse": ["a", {"column": "b", "rows": 7}]},
            },
            "model": {"num_embeddings": 100},
        }
    )
    assert config.rows_per_table == (100, 7)
    assert config.table_names == ("t_a", "t_b")


def test_the_sharding_section_names_tables_after_their_features() -> None:
    config = load_config(["--data.num-sparse", "2", "--sharding.tables", '{"t_cat_1": ["row_wise"]}'], {})
    assert config.sharding.tables == {"t_cat_1": ("row_wise",)}
    assert config.table_names == ("t_cat_0", "t_cat_1")


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        TrainConfig().train.batch_size = 3


# --- imports --------------------------------------------------------------------------------------------------------

REPORT = f"; import json, sys; print(json.dumps(sorted(set({HEAVY!r}) & set(sys.modules))))"


def test_the_configuration_imports_only_pydantic_and_the_standard_library() -> None:
    foreign = (
        "import sys; before = set(sys.modules); import trainer.config; "
        "tops = {m.partition('.')[0] for m in set(sys.modules) - before}; print(*tops - sys.stdlib_module_names)"
    )
    shown = run_python("-c", foreign)
    pydantics_own = {"pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection"}
    extra = {top for top in set(shown.stdout.split()) - pydantics_own - {"trainer"} if not top.startswith("_")}
    assert not extra, f"Pulumi programs build a TrainConfig without these: {shown.stderr}"
    assert "pydantic" in shown.stdout, "the test missed the import"


def test_help_and_config_import_no_torch() -> None:
    commands = [
        ["--help"],
        ["train", "--help"],
        ["config"],
        ["launch", "--help"],
        ["bench", "--help"],
        ["export", "-h"],
    ]
    code = f"from trainer.main import main; assert not any(main(command) for command in {commands!r}){REPORT}"
    shown = run_python("-c", code)
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout.splitlines()[-1]) == [], "the help would take seconds"


def test_help_lists_the_commands_and_train_help_the_options() -> None:
    overview = run_python("-m", "trainer", "--help")
    assert overview.returncode == 0, overview.stderr
    for command in ("train", "evaluate", "export", "predict", "bench", "config", "launch", "report"):
        assert re.search(rf"^  {command} ", overview.stdout, re.MULTILINE), f"--help does not list {command}"
    options = run_python("-m", "trainer", "train", "--help").stdout
    for path in leaves():
        assert f"--{option_name(path)} " in options, f"train --help does not list {option_name(path)}"


def test_the_config_command_prints_a_tree_that_can_be_read_again_and_its_schema(tmp_path: Path) -> None:
    arguments = [
        "--train.batch-size=12",
        "--model.num-embeddings=[4,5]",
        "--data.num-sparse=2",
        "--train.target-auc=.75",
    ]
    shown = run_python("-m", "trainer", "config", *arguments, env={"TRAINER_TRAIN__STEPS": "9"})
    printed = json.loads(shown.stdout)
    assert TrainConfig.model_validate(printed["config"]) == load_config([*arguments, "--train.steps", "9"], {})
    file = tmp_path / "again.json"
    file.write_text(json.dumps(printed["config"]), encoding="utf-8")
    again = load_config(["--config", str(file)], {})
    assert again == TrainConfig.model_validate(printed["config"]), "its output is not a valid file"
    assert printed["schema"]["properties"].keys() == TrainConfig.model_fields.keys()
    assert printed["schema"]["additionalProperties"] is False


def test_a_mistake_ends_with_exit_code_2_and_one_line() -> None:
    for arguments in (
        ["config", "--train.stepz=3"],
        ["nonsense"],
        ["train", "--train.steps=0"],
        ["launch", "--nproc=0"],
    ):
        shown = run_python("-m", "trainer", *arguments)
        assert shown.returncode == 2, f"{arguments} is a user mistake"
        assert shown.stderr.startswith("error: "), shown.stderr
        assert shown.stderr.count("\n") == 1, f"one line, no stack trace: {shown.stderr}"
        assert not shown.stdout
