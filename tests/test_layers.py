"""The house holds: who may import whom, no torch where none is needed, nothing too large to read."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml

from toolkit.cli import COMMANDS
from toolkit.config.files import Loader

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "toolkit"
# Longest matching prefix wins. A module may import from its own package and from any lower layer.
LAYERS = {
    "toolkit": 0,
    "toolkit.messages": 0,
    "toolkit.sample_types": 0,
    "toolkit.secrets": 0,
    "toolkit.config": 0,
    "toolkit.launch": 1,
    "toolkit.plan": 1,
    "toolkit.arguments": 1,
    "toolkit.command_line": 1,
    "toolkit.report": 1,
    "toolkit.engine.ds_config": 1,
    "toolkit.engine.ds_import": 1,
    "toolkit.engine.ds_keys": 1,
    "toolkit.distributed": 2,
    "toolkit.checkpoint": 3,
    "toolkit.models": 3,
    "toolkit.data": 3,
    "toolkit.track": 3,
    "toolkit.engine": 3,
    "toolkit.layouts": 4,
    "toolkit.evaluate": 4,
    "toolkit.export": 4,
    "toolkit.train": 5,
    "toolkit.tasks": 6,
    "toolkit.jobs": 7,
    "toolkit.custom": 7,
    "toolkit.cli": 8,
    "toolkit.extras": 9,
    "toolkit.__main__": 10,
}
SAME_LAYER = {
    ("toolkit.plan.calibration", "toolkit.launch.environment"),  # a free port for its ranks
    ("toolkit.arguments", "toolkit.engine.ds_config"),  # arguments make a DeepSpeed JSON, or are made of one
    ("toolkit.arguments", "toolkit.engine.ds_import"),
    ("toolkit.arguments", "toolkit.engine.ds_keys"),
    ("toolkit.arguments", "toolkit.command_line"),  # an unknown option, a number of ranks
    ("toolkit.command_line", "toolkit.launch.deepspeed"),  # its options, for an unknown one
}
STRANGERS = [("models", "data"), ("evaluate", "export")]
LATE = "toolkit.layouts"
"""A package whose modules are imported by the function that meets what a config names, so from lower layers, too."""
EXTRAS_NAMED = {
    "toolkit/cli/__init__.py": {
        "toolkit.extras.completion",
        *(module for module in COMMANDS.values() if module.startswith("toolkit.extras.")),
    },
    "toolkit/cli/eval.py": {"toolkit.extras.scores"},
    "toolkit/cli/plan.py": {"toolkit.extras.trace"},
    "toolkit/jobs/check.py": {"toolkit.extras.type_trial"},
    "toolkit/jobs/nodes.py": {"toolkit.extras.doctor.examine"},
    "toolkit/plan/calibration.py": {"toolkit.extras.calibration"},
    "toolkit/tasks/language.py": {"toolkit.extras.serving"},
}
"""Where the core names what serves around a run, as a string: commands, and what a config or an argument asks for."""
# file_lock.py, ended.py and failure.py serve processes that have no torch yet; the rest of their layer needs it.
LARGEST_FUNCTION = 60


def module_name(path: Path) -> str:
    """Return the dotted name of a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def files() -> list[Path]:
    """Return every module of the package."""
    return sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def imports(path: Path, late: bool = True) -> Iterator[str]:
    """Yield the toolkit modules that a file imports, but not for type checking only; `late`: inside functions too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    in_functions = {inner for function in functions for inner in ast.walk(function)}
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if node in typing_only or (not late and node in in_functions):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "toolkit")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "toolkit":
            for alias in node.names:
                submodule = ROOT.joinpath(*f"{node.module}.{alias.name}".split(".")).with_suffix(".py")
                yield f"{node.module}.{alias.name}" if submodule.is_file() else str(node.module)
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: relative imports hide the direction"


def layer(name: str) -> int:
    """Return a module's layer."""
    return LAYERS[max((key for key in LAYERS if name == key or name.startswith(f"{key}.")), key=len)]


def package(name: str) -> str:
    """Return the package below toolkit that a module belongs to."""
    return ".".join(name.split(".")[:2])


def test_imports_run_downwards() -> None:
    edges = [(module_name(path), target) for path in files() for target in imports(path)]
    assert len(edges) > 500
    for name, target in edges:
        same_package = package(name) == package(target)
        may = layer(target) < layer(name) or (same_package and layer(target) <= layer(name)) or layer(name) == 0
        may = may or target.startswith(f"{LATE}.")  # see below
        assert may or (name, target) in SAME_LAYER, (
            f"{name} (layer {layer(name)}) imports {target} (layer {layer(target)})"
        )
        if layer(name) == 0:
            assert layer(target) == 0, f"{name} imports {target}"
        for left, right in STRANGERS:
            pair = {package(name), package(target)}
            assert pair != {f"toolkit.{left}", f"toolkit.{right}"}, f"{name} imports {target}"


def test_layouts_are_imported_where_a_config_names_them() -> None:
    for path in files():
        if package(module_name(path)) not in (LATE, "toolkit.extras"):
            assert not [name for name in imports(path, late=False) if name.startswith(LATE)], path


def test_training_knows_no_task_by_name() -> None:
    """A Task is handed to it: one that is added needs no change there, and its module alone is imported."""
    for path in (PACKAGE / "train").glob("*.py"):
        assert not [name for name in imports(path) if name.startswith("toolkit.tasks")], path
    assert not [name for name in imports(PACKAGE / "tasks" / "registry.py") if name.startswith("toolkit.tasks")]


def test_the_core_does_without_extras() -> None:
    """What serves around a run could be deleted without breaking one: a string names it where it is asked for."""
    named = {}
    for path in files():
        name = module_name(path)
        if name.startswith("toolkit.extras"):
            continue
        text = path.read_text(encoding="utf-8")
        strings = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
        assert not [target for target in imports(path) if target.startswith("toolkit.extras")], path
        assert not re.search(r"^\s*(from|import) toolkit\.extras", text, re.MULTILINE), path
        targets = {text for text in strings if isinstance(text, str) and re.fullmatch(r"toolkit\.extras[\w.]*", text)}
        named |= {path.relative_to(ROOT).as_posix(): targets} if targets else {}
    assert named == EXTRAS_NAMED
    assert all((ROOT / f"{target.replace('.', '/')}.py").exists() for targets in named.values() for target in targets)


def test_every_package_is_in_the_table() -> None:
    packages = {module_name(path) for path in PACKAGE.glob("*/__init__.py")}
    assert packages <= set(LAYERS)
    listed = re.findall(r'^    "(toolkit[a-z.]*)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted({module_name(path) for path in PACKAGE.glob("**/__init__.py")}), "for a wheel"


def test_a_wheel_holds_every_data_file() -> None:
    table = (ROOT / "pyproject.toml").read_text().partition("[tool.setuptools.package-data]")[2].partition("\n[")[0]
    packed = {
        path
        for name, patterns in re.findall(r'^"(toolkit[.a-z]*)" = (\[.*\])$', table, re.MULTILINE)
        for pattern in ast.literal_eval(patterns)
        for path in ROOT.joinpath(*name.split(".")).glob(pattern)
    }
    data = {path for path in PACKAGE.rglob("*.*") if path.suffix not in (".py", ".pyc")}
    assert data == packed
    assert PACKAGE / "locale" / "zh.yaml" in packed


def test_the_package_knows_nothing_of_what_measures_and_tests_it() -> None:
    """benchmarks/, scripts/ and tests/ import the package; it imports none of them, and a wheel holds none of them."""
    outside = {"benchmarks", "scripts", "tests"}
    for path in files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & outside, path
    packages = re.search(r"^packages = \[\n(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert packages
    assert {name.split(".")[0] for name in re.findall(r'"(.+)"', packages[1])} == {"toolkit"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.yaml")), ids=lambda path: path.name)
def test_no_data_file_names_a_key_twice(path: Path) -> None:
    assert yaml.load(path.read_text(encoding="utf-8"), Loader)  # which rejects it


def test_nothing_private_of_config_libraries_is_imported() -> None:
    """What a minor version of OmegaConf or Hydra moves would stop every command."""
    for path in files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if re.match(r"(omegaconf|hydra)\b.*\._", name)], path


def test_nothing_is_called_utils() -> None:
    assert not [path for path in PACKAGE.rglob("*") if path.stem in ("utils", "util", "common", "helpers", "misc")]


def test_functions_are_read_at_once() -> None:
    for path in (*files(), *(ROOT / "benchmarks").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or 0) - node.lineno + 1
                assert lines <= LARGEST_FUNCTION, f"{path}: {node.name} has {lines} lines"


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module_name(path): {*imports(path, late=False)} for path in files()}
    order = TopologicalSorter(graph)
    order.prepare()  # a CycleError names the circle


def test_one_file_names_the_devices_of_one_maker() -> None:
    """Ranks ask DeepSpeed's accelerator, everything else distributed/accelerator.py; CUDA of config/devices.py is
    the one place that spells the device.
    """
    asking, spelling = set[str](), set[str]()
    for path in files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "cuda" and not isinstance(node.value, ast.Constant):
                asking.add(path.stem)
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.accelerator":
                asking.add(path.stem)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                spelling |= {path.stem} if node.value.split(":")[0] == "cuda" else set()
    assert (asking, spelling) == ({"accelerator"}, {"devices"})
    benchmarks = (path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("*.py"))
    assert not [text for text in benchmarks if "cuda.is_available" in text]


def test_planning_needs_no_torch() -> None:
    """Config, launch and the DeepSpeed dict answer without torch, deepspeed or transformers."""
    modules = [name for name in map(module_name, files()) if layer(name) <= 1]
    modules += [
        "toolkit.cli",
        "toolkit.cli.train",
        "toolkit.cli.check",
        "toolkit.cli.eval",
        "toolkit.extras.cli.export_config",
        "toolkit.extras.cli.import_config",
        "toolkit.cli.prepare",
        "toolkit.cli.launch",
        "toolkit.extras.cli.sweep",
        "toolkit.extras.cli.doctor",
        "toolkit.cli.verify",
        "toolkit.cli.export_model",
        "toolkit.cli.report",
    ]
    code = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        "heavy = {'torch', 'deepspeed', 'transformers', 'datasets'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    finished = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr
    assert len(modules) > 20


def test_variables_say_what_they_are() -> None:
    """Of all functions at most 3 % bind a name of scripts/vague_names.py, such as `found`; it lists them."""
    command = [sys.executable, str(ROOT / "scripts" / "vague_names.py")]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    vague, total = map(int, re.findall(r"^(\d+) of (\d+) functions", listed, re.MULTILINE)[0])
    assert total > 3000
    assert vague <= 0.03 * total, listed
