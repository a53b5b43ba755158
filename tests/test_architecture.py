"""Imports that import-linter cannot express (the layers are in pyproject.toml), and the names each package exports."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Public names. Other packages import them, so a change of this list changes a contract.
EXPORTS = {
    "trainer.bench": ["bench_main"],
    "trainer.checkpoint": [
        "CheckpointStore",
        "Checkpointer",
        "FsspecStore",
        "Progress",
        "SaveFailedError",
        "Saver",
        "load_saved_config",
        "open_store",
    ],
    "trainer.data": ["Batch", "KnowsBestAuc", "Source", "SourceContext", "jagged_batch", "one_id_batch", "open_source"],
    "trainer.metrics": ["Quality", "Reporter"],
    "trainer.preprocess": ["preprocess_main"],
}


def files(package: str) -> list[Path]:
    """Return the modules of a package."""
    return sorted(path for path in (ROOT / package).rglob("*.py") if "__pycache__" not in path.parts)


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def statements(tree: ast.AST, lazy: bool) -> Iterator[ast.stmt]:
    """Yield the statements that an import runs, with `lazy` also those in functions; skip TYPE_CHECKING blocks."""
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            continue
        if not lazy and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.stmt):
            yield node
        yield from statements(node, lazy)


def imports(path: Path, lazy: bool = True) -> set[str]:
    """Return the full names that a module imports: `a.b.c` also for `from a.b import c`."""
    name, found = module_name(path), set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in statements(ast.parse(path.read_text(encoding="utf-8")), lazy):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def top_level_imports(path: Path, lazy: bool = True) -> set[str]:
    return {name.partition(".")[0] for name in imports(path, lazy)}


def is_within(name: str, *allowed: str) -> bool:
    return any(name == a or name.startswith(a + ".") for a in allowed)


def test_imports_finds_every_kind_of_import(tmp_path: Path) -> None:
    file = ROOT / "trainer" / "data" / "made_up.py"
    text = "import a.b\nfrom c import d\nfrom . import e\nfrom ..x import y\ndef f():\n    import lazy\n"
    tree = tmp_path / "trainer" / "data" / "made_up.py"
    tree.parent.mkdir(parents=True)
    tree.write_text(text + "if TYPE_CHECKING:\n    import never\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "ROOT", tmp_path)
        assert imports(tree) == {"a.b", "c.d", "trainer.data.e", "trainer.x.y", "lazy"}
        assert imports(tree, lazy=False) == {"a.b", "c.d", "trainer.data.e", "trainer.x.y"}
    assert not file.exists()


def test_the_settings_import_only_pydantic_and_the_standard_library() -> None:
    for path in set((ROOT / "trainer" / "config").glob("*.py")) - {ROOT / "trainer" / "config" / "options.py"}:
        foreign = {n for n in imports(path) if not is_within(n, *sys.stdlib_module_names, "pydantic", "trainer.config")}
        assert not foreign, f"{path} imports {foreign}: a cluster program builds a TrainConfig without torch"


@pytest.mark.parametrize(
    "name",
    [
        "__main__",
        "main",
        "config.options",
        "help",
        "errors",
        "config.schema",
        "launch.launcher",
        "export.command",
        "export.predict",
        "bench.command",
        "planning.command",
        "planning.options",
        "planning.plan",
        "planning.work",
        "planning.roofline",
    ],
)
def test_a_fast_command_imports_no_heavy_package_at_start(name: str) -> None:
    path = ROOT / "trainer" / (name.replace(".", "/") + ".py")
    heavy = {"torch", "torchrec", "fbgemm_gpu", "numpy", "pyarrow", "polars", "fsspec", "tensorboard", "sklearn"}
    assert not top_level_imports(path, lazy=False) & heavy, f"{path} would make --help take seconds"


def test_only_three_modules_depend_on_torchrecs_shard_layout() -> None:
    dependent = {
        module_name(path)
        for path in files("trainer")
        if any("sharded_tensor" in n or "ShardedEmbeddingBagCollection" in n for n in imports(path))
    }
    allowed = {"trainer.sharding.local_shards", "trainer.checkpoint.state", "trainer.checkpoint.snapshot"}
    assert dependent <= allowed, "another module depends on the shard layout"


@pytest.mark.parametrize("package", EXPORTS)
def test_a_package_exports_the_names_of_the_frozen_list(package: str) -> None:
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text(encoding="utf-8"))
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
    )
    assert sorted(names) == sorted(EXPORTS[package]), "a public name was added or removed: other packages import these"


def test_every_package_of_the_trainer_is_in_the_frozen_list() -> None:
    found = {module_name(p) for p in files("trainer") if p.name == "__init__.py"} - {"trainer"}
    assert set(EXPORTS) <= found
