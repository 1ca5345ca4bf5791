"""What the package offers is a tested list, and its modules import one way."""

import ast
import importlib
import inspect
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

import pytest

import safeload

PACKAGE = Path(safeload.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
)
# The stages, in the order in which data flows; helpers lie anywhere that lets none of these reach to its right.
ORDER = [
    "errors",
    "headers",
    "resolving",
    "verifying",
    "sealing",
    "building",
    "planning",
    "group",
    "broadcasting",
    "sharing",
    "placing",
    "protecting",
    "precision",
    "reporting",
    "loading",
    "cli",
]

PUBLIC = [
    "CheckpointError",
    "GradientReport",
    "GroupError",
    "IntegrityError",
    "LoadReport",
    "MismatchedCallError",
    "PeerError",
    "PrecisionError",
    "PrecisionReport",
    "PrecisionWarning",
    "ProtectionError",
    "RankReport",
    "SafeLoadError",
    "SourceError",
    "TowerChangedError",
    "TowerCheck",
    "UnsafeFormatError",
    "UnverifiedError",
    "UnverifiedWarning",
    "check_precision",
    "check_towers",
    "frozen_towers",
    "gradient_report",
    "ignored_modules",
    "ignored_modules_pattern",
    "ignored_parameters",
    "load_report",
    "redirect_from_pretrained",
    "restore_towers",
    "safe_from_pretrained",
    "unfreeze",
    "upcast_trainable",
    "verify_checkpoint",
    "write_lock",
]


def test_the_public_names_are_these():
    assert safeload.__all__ == PUBLIC == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(safeload, name).__name__ == name
    assert set(PUBLIC) <= set(dir(safeload))
    with pytest.raises(AttributeError, match="no_such_name"):
        safeload.no_such_name  # noqa: B018


def test_type_checkers_see_the_names_that_are_looked_up_late():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    shown = {
        alias.name: node.module
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert shown == {name: f"safeload.{home}" for name, home in safeload._HOMES.items()}
    assert set(shown) <= set(PUBLIC)


def test_every_error_class_is_public():
    from safeload import errors

    found = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert found <= set(PUBLIC)


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_each_module_lists_what_it_offers(name):
    module = importlib.import_module(name)
    assert module.__doc__
    offered = vars(module).get("__all__", [])
    own = {key for key, value in vars(module).items() if getattr(value, "__module__", None) == name}
    assert offered or not own, "no __all__"
    assert list(offered) == sorted(offered, key=_ruff_order)
    for each in offered:
        assert hasattr(module, each), each
    used_elsewhere = {
        each
        for other, names in _imported_names().items()
        for each in names.get(name, ())
        if other != name and not isinstance(getattr(module, each), TypeVar)
    }
    assert used_elsewhere <= set(offered) | set(_submodules(name)), "imported elsewhere and not in __all__"


def _ruff_order(name):
    """Constants, classes, the rest: the order in which ruff sorts `__all__` (RUF022)."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2, name)


def _submodules(name):
    return [module.rpartition(".")[2] for module in MODULES if module.rpartition(".")[0] == name]


def _imported_names():
    """{module: {safeload module: names that it imports from it}}, imports inside of functions too."""
    found = {}
    for name in MODULES:
        path = PACKAGE.parent.joinpath(*name.split("."))
        source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        names = found.setdefault(name, {})
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "safeload":
                names.setdefault(node.module, set()).update(alias.name for alias in node.names)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == "safeload":
                        names.setdefault(alias.name, set())
    return found


def _graph():
    """{module: modules that it imports}; `from safeload import x` counts as an import of x's home."""
    graph = {}
    for name, imported in _imported_names().items():
        targets = set()
        for module, names in imported.items():
            targets.add(module)
            targets |= {f"{module}.{each}" for each in names if f"{module}.{each}" in MODULES}
            if module == "safeload":
                targets |= {f"safeload.{safeload._HOMES[each]}" for each in names if each in safeload._HOMES}
        graph[name] = {target for target in targets if target in MODULES and target not in (name, "safeload")}
    return graph


def _reached(graph, start):
    """What a module imports, directly or not, with the road to it."""
    roads, waiting = {}, [(start, (start,))]
    while waiting:
        at, road = waiting.pop()
        for target in graph[at]:
            if target not in roads:
                roads[target] = (*road, target)
                waiting.append((target, roads[target]))
    return roads


UPWARD = {
    ("safeload.guarding", "safeload.protecting"),  # a tower that is copied or unpickled is protected again
    ("safeload.gradients", "safeload.picturing"),  # a report draws itself
}


def test_imports_go_one_way():
    graph = _graph()
    for module, target in UPWARD:
        assert target in graph[module], "no longer an exception"
        graph[module].discard(target)
    roads = {name: _reached(graph, name) for name in MODULES}
    circles = {name: " -> ".join(found[name]) for name, found in roads.items() if name in found}
    assert not circles
    there = [f"safeload.{stage}" for stage in ORDER if f"safeload.{stage}" in MODULES]
    assert len(there) > 10
    backward = [
        " -> ".join(roads[left][right])
        for place, left in enumerate(there)
        for right in there[place + 1 :]
        if right in roads[left]
    ]
    assert not backward
    assert graph["safeload.errors"] == set()
    callers = {name for name, targets in graph.items() if "safeload.loading" in targets}
    assert not callers & set(there) - {"safeload.cli"}


def test_the_one_way_test_can_fail():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}}
    assert _reached(graph, "a")["a"] == ("a", "b", "c", "a")


def test_the_package_is_typed():
    assert files("safeload").joinpath("py.typed").is_file()


def test_importing_safeload_is_light():
    code = (
        "import sys, time\n"
        "start = time.perf_counter()\n"
        "import safeload\n"
        "seconds = time.perf_counter() - start\n"
        "print(seconds, 'torch' in sys.modules)\n"
        "import torch\n"
        "safeload.safe_from_pretrained\n"
        "heavy = {'transformers', 'accelerate', 'diffusers', 'huggingface_hub', 'rich', 'deepspeed'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    first, second = done.stdout.splitlines()
    seconds, has_torch = first.split()
    assert float(seconds) < 0.5  # 0.01 s when measured; torch alone takes some two seconds
    assert has_torch == "False"
    assert second == "[]"
