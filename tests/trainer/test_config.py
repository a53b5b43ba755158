"""The tree of options: the sources of a value, the errors for mistakes, and the absence of heavy imports."""

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
from trainer.errors import UserError
from trainer.help import command_help

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden" / "options.txt"
HEAVY = ("torch", "torchrec", "fbgemm_gpu", "numpy", "pandas", "polars", "pyarrow", "fsspec", "tensorboard", "rich")


def run_python(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRAINER_")} | (env or {})
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)


def refusal(*arguments: str, environ: dict[str, str] | None = None) -> str:
    """Return the error of a command line and an environment, after checking that it is one line."""
    with pytest.raises(UserError) as caught:
        load_config(arguments, environ or {})
    message = str(caught.value)
    assert "\n" not in message, "an error is one line"
    return message


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


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--train.batch-sise", "3"], ["--train.batch-sise", "did you mean --train.batch-size"]),
        (["--trian.batch-size", "3"], ["--trian.batch-size", "did you mean --train.batch-size"]),
        (["--batch-size", "3"], ["--batch-size", "did you mean --train.batch-size"]),
        (["--train.batch-size"], ["--train.batch-size", "needs a value"]),
        (["--train.batch-size", "--train.steps", "3"], ["--train.batch-size", "needs a value"]),
        (["batch", "3"], ["'batch'", "--section.option VALUE"]),
        (["--train.batch-size", "many"], ["--train.batch-size", "'many'", "integer"]),
        (["--train.batch-size", "0"], ["--train.batch-size", "0", "greater than 0"]),
        (["--train.steps", "1.5"], ["--train.steps", "1.5", "integer"]),
        (["--train.compile", "maybe"], ["--train.compile", "'maybe'", "boolean"]),
        (["--optim.sparse.learning-rate", "NaN"], ["--optim.sparse.learning-rate", "nan", "finite"]),
        (["--optim.dense.optimizer", "lion"], ["--optim.dense.optimizer", "'lion'", "'adam' or 'adamw'"]),
        (["--optim.sparse.optimizer", "adamw"], ["--optim.sparse.optimizer", "'adamw'", "'rowwise_adagrad'"]),
        (["--train.target-auc", "0.4"], ["--train.target-auc", "0.4", "0.5"]),
        (["--metrics.prometheus-port", "99999"], ["--metrics.prometheus-port", "99999", "65535"]),
        (["--checkpoint.uri", ""], ["--checkpoint.uri", "''", "1 character"]),
        (["--train.run", "Bad_Name"], ["--train.run", "'Bad_Name'", "a-z0-9"]),
        (["--model.embedding-dim", "32"],
         ["model.dense_arch must end in model.embedding_dim", "got 64; allowed: 32", "'[512, 256, 32]'"]),
        (["--model.dense-arch", "[512,32]"], ["model.dense_arch", "32", "model.embedding_dim", "64"]),
        (["--model.over-arch", "[8,2]"], ["model.over_arch", "got 2; allowed: 1"]),
        (["--model.dense-arch", "[]"], ["--model.dense-arch", "[]", "at least 1"]),
        (["--model.num-embeddings", "[1,2]"], ["model.num_embeddings", "2 tables", "26 sparse features"]),
        (["--model.num-embeddings", "criteo-1tb", "--data.num-sparse=3"], ["26 tables", "3", "--data.num-sparse 26"]),
        (["--model.num-embeddings", "criteo"], ["--model.num-embeddings", "'criteo'", "criteo-1tb"]),
        (["--sharding.types", '["diagonal"]'], ["--sharding.types", "diagonal", "'row_wise'"]),
        (["--sharding.tables", '{"t_x": ["row_wise"]}', "--data.num-sparse=2"], ["t_x", "allowed: t_cat_0, t_cat_1"]),
        (["--sharding.tables", '{"t_cat_0": ["diagonal"]}'], ["--sharding.tables", "diagonal", "'row_wise'"]),
        (["--data.num-dense", "0"], ["dense feature", "data.num_dense"]),
        (["--data.source", "kafka"], ["--data.source", "'kafka'", "synthetic"]),
        (["--data.source", "parquet"], ["data.path", "missing", "--data.path"]),
        (["--data.source", "parquet", "--data.path", "x"],
         ["data.parquet.sparse is empty", "one or more categorical columns"]),
        (["--data.eval-samples", "0"], ["data.eval_samples", "0", "1 or more"]),
        (["--data.source=criteo", "--data.path=x", "--data.criteo.eval-days=[3]"],
         ["eval_days", "[3]", "overlaps train_days"]),
        (["--data.parquet.sparse", '[{"colum": "a"}]'], ["--data.parquet.sparse", "colum", "column"]),
        (["--data.source=parquet", "--data.path=x", '--data.parquet.sparse=["a", "a"]', '--data.parquet.dense=["d"]'],
         ["data.parquet.sparse", "'a'", "more than once"]),
    ],
)  # fmt: skip
def test_an_error_names_the_option_the_value_and_what_is_allowed(arguments: list[str], parts: list[str]) -> None:
    message = refusal(*arguments)
    for part in parts:
        assert part in message, f"the message lacks {part!r}"


def test_one_wrong_value_is_reported_once() -> None:
    wrong = {
        "--sharding.types": '["diagonal"]',
        "--model.num-embeddings": "lots",
        "--data.parquet.sparse": '[{"x": 1}]',
    }
    for option, value in wrong.items():
        assert refusal(option, value).count(option) == 1, "one mistake reads as several"


def test_all_wrong_options_are_reported_together() -> None:
    message = refusal("--train.batch-size", "x", "--train.steps", "0")
    assert "--train.batch-size" in message
    assert "--train.steps" in message, "users should not have to find their mistakes one run at a time"


def test_an_unknown_environment_variable_is_refused_with_a_suggestion() -> None:
    message = refusal(environ={"TRAINER_TRAIN__BATCH_SISE": "3"})
    assert "TRAINER_TRAIN__BATCH_SISE" in message
    assert "did you mean TRAINER_TRAIN__BATCH_SIZE?" in message


def test_a_wrong_value_in_the_environment_is_refused() -> None:
    assert "'x'" in refusal(environ={"TRAINER_TRAIN__BATCH_SIZE": "x"})


def test_variables_of_other_programs_are_ignored() -> None:
    assert load_config([], {"RANK": "0", "PATH": "/bin", "TRAINING": "1"}) == TrainConfig()


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("a.ini", "x = 1", [".ini", "allowed: .json, .toml, .yaml, .yml"]),
        ("noending", "{}", ["none", "allowed: .json"]),
        ("a.json", "{", ["not valid json", "line 1"]),
        ("a.toml", "x = = 1", ["not valid toml", "line 1"]),
        ("a.yaml", "a: [", ["not valid yaml", "line 1"]),
        ("a.json", "[1, 2]", ["list", "allowed: a mapping"]),
        ("a.yaml", "- train", ["list", "allowed: a mapping"]),
        ("a.json", '{"trian": {"steps": 3}}', ["trian", "did you mean train?"]),
        ("a.json", '{"train": {"stepz": 3}}', ["train.stepz", "did you mean train.steps?"]),
        ("a.yaml", "train: {batch-size: 3}", ["train.batch-size", "did you mean train.batch_size?"]),
        ("a.json", '{"train": 3}', ["train", "3"]),
        ("a.json", '{"train": {"steps": "x"}}', ["--train.steps", "'x'", "integer"]),
        ("a.json", "\xff\xfe", ["cannot be read"]),
    ],
)
def test_the_error_for_a_wrong_file_says_what_is_allowed(
    name: str, text: str, parts: list[str], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    message = refusal("--config", str(tmp_path / name))
    for part in parts:
        assert part in message, f"the message lacks {part!r}"


def test_the_error_for_a_missing_file_names_its_path_and_origin(tmp_path: Path) -> None:
    assert f"{tmp_path}/none.json" in refusal("--config", f"{tmp_path}/none.json")
    message = refusal(environ={"TRAINER_CONFIG": f"{tmp_path}/none.toml"})
    assert f"{tmp_path}/none.toml" in message
    assert "TRAINER_CONFIG" in message, "the file was not given by --config"


def test_a_number_in_place_of_a_section_is_refused_when_an_option_of_the_section_is_set(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"train": 3}', encoding="utf-8")
    assert "train in the configuration file is not a section: got 3" in refusal(
        "--config", str(tmp_path / "a.json"), "--train.steps", "3"
    )


@pytest.mark.parametrize(("world_size", "allowed"), [(3, "63 or 66"), (128, "128")])
def test_the_error_for_a_batch_that_does_not_divide_names_the_nearest_allowed_sizes(
    world_size: int, allowed: str
) -> None:
    config = load_config(["--train.batch-size", "64"], {})
    with pytest.raises(ValueError, match=r"train\.batch_size does not divide by .* got 64") as caught:
        config.check_world_size(world_size)
    assert allowed in str(caught.value)
    assert "--train.batch-size" in str(caught.value)


def test_an_evaluation_batch_that_does_not_divide_is_refused_too() -> None:
    config = load_config(["--train.batch-size", "64", "--train.eval-batch-size", "33"], {})
    with pytest.raises(ValueError, match=r"train\.eval_batch_size does not divide by 2 processes: got 33"):
        config.check_world_size(2)


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
