"""The import rules of ARCHITECTURE.md, read off the source with ast: no module is imported to check it.

Every module of the packages belongs to one layer of LAYERS; a new module fails here until it is given one. The
checker works on source text, so that the tests below can plant a violation and see it found.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("aserve", "aserve_kernels", "routes")

EVENT_LOOP = frozenset({"asyncio", "anyio", "uvloop", "starlette", "uvicorn", "sse_starlette"})
CLOCKS = frozenset({"time", "datetime"})
WEB = frozenset({"starlette", "uvicorn", "sse_starlette"})


@dataclass(frozen=True)
class Layer:
    """What the modules of one layer may import: `sees` names the layers below it, its own included."""

    name: str
    modules: tuple[str, ...]  # a name, or a name ending in ".*" for everything in that package
    sees: frozenset[str]
    banned: frozenset[str] = frozenset()  # top-level names of other packages, at any depth of the module
    stdlib_only: bool = False

    def owns(self, module: str) -> bool:
        """True where the module is listed, by name or by its package."""
        return any(
            module == entry or (entry.endswith(".*") and (module + ".").startswith(entry[:-1]))
            for entry in self.modules
        )


def _layer(
    name: str, modules: str, sees: str, banned: frozenset[str] = frozenset(), stdlib_only: bool = False
) -> Layer:
    qualified = tuple(entry if entry.startswith(PACKAGES) else f"aserve.{entry}" for entry in modules.split())
    return Layer(name, qualified, frozenset({name, *sees.split()}), banned, stdlib_only)


LAYERS = (
    _layer("words", "beams config constraint errors request plan", "", stdlib_only=True),
    _layer(
        "pure",
        "admission batch beam_groups block_manager claims deadlines detokenizer forecast lazy_heap metrics policy"
        " preemption prefix_cache quarantine residency results roster scheduler seat simulation.* steps stop_strings"
        " waiting",
        "words",
        EVENT_LOOP | CLOCKS | {"torch", "transformers", "threading"},
    ),
    _layer("kernels", "aserve_kernels.*", "", EVENT_LOOP),
    _layer("models", "models.*", "words kernels", EVENT_LOOP),
    _layer("worker", "worker.*", "words kernels models executor", EVENT_LOOP),
    _layer("executor", "executors", "words", WEB | {"torch"}),
    _layer("executors", "executors.thread", "words executor", WEB | {"torch"}),
    _layer(
        "async",
        "bad_words chat_template client engine grammar intake json_schema llm loading output pipeline prompts ranking"
        " search stream structured tokenizer tokenizer_files",
        "words pure executor",
        WEB | {"torch"},
    ),
    _layer("profiling", "profiling", "words pure async", WEB),
    _layer("public", "aserve", "words pure async profiling"),
    _layer(
        "program",
        "cli simulation.command __main__ bench.*",
        "words pure models executor async profiling public routes program",
    ),
    _layer("routes", "routes.*", "public", frozenset({"torch", "transformers"})),
)

# The exceptions to `sees`: what an engine needs when it starts. Each is inside a function (or for type checking), so
# that a program pays for the model's side only where it runs a model.
LAZY = frozenset(
    {
        ("aserve.loading", "aserve.executors.thread"),
        ("aserve.loading", "aserve.models.files"),
        ("aserve.loading", "aserve.worker.runner"),
    }
)


@dataclass(frozen=True)
class Import:
    """One imported module (absolute), the name taken from it, and whether importing the file leaves it alone."""

    line: int
    module: str
    name: str | None
    lazy: bool


def imports(source: str, module: str, *, package: bool = False) -> Iterator[Import]:
    """Every import in the source, those for type checking included: a layer must not even name what it may not see."""
    yield from _imports(ast.parse(source), module if package else module.rpartition(".")[0], False)


def _imports(node: ast.AST, package: str, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(child.lineno, alias.name, None, lazy)
        elif isinstance(child, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
            base = ".".join([*parents, *([child.module] if child.module else [])])
            for alias in child.names:
                yield Import(child.lineno, base, alias.name, lazy)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or (
                isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING"
            )
            yield from _imports(child, package, lazy or inside)


def layer_of(module: str) -> Layer | None:
    """The layer that owns a module: the entry that names it outright before one that names its package."""
    exact = [layer for layer in LAYERS if module in layer.modules]
    return next(iter(exact or [layer for layer in LAYERS if layer.owns(module)]), None)


def violations(
    source: str, module: str, known: frozenset[str], public: frozenset[str], *, package: bool = False
) -> list[str]:
    """What the source of `module` imports against the rules. `known` are all modules of the packages, `public` the
    names of aserve's __all__."""
    layer = layer_of(module)
    if layer is None:
        return [f"{module} is in no layer: add it to LAYERS"]
    found = []
    for item in imports(source, module, package=package):
        where = f"{module}:{item.line}"
        top = item.module.split(".")[0]
        submodule = f"{item.module}.{item.name}"
        target = submodule if item.name and submodule in known else item.module
        if top in PACKAGES:
            owner = layer_of(target)
            if layer.name == "routes" and top == "aserve":
                if target != "aserve" or (item.name is not None and item.name not in public):
                    found.append(f"{where}: {submodule if item.name else target} is not a public name of aserve")
            elif target not in known:
                found.append(f"{where}: there is no module {target}")
            elif (owner is None or owner.name not in layer.sees) and not (item.lazy and (module, target) in LAZY):
                found.append(f"{where}: {layer.name} may not import {target}")
        elif top in layer.banned:
            found.append(f"{where}: {layer.name} may not import {top}")
        elif layer.stdlib_only and top not in sys.stdlib_module_names:
            found.append(f"{where}: {layer.name} is stdlib only, {top} is not")
    return found


def outsider_violations(source: str, module: str, allowed: dict[str, frozenset[str]]) -> list[str]:
    """What a program outside the packages takes from them beyond `allowed`: module -> names it may take."""
    found = []
    for item in imports(source, module):
        if item.module.split(".")[0] not in PACKAGES:
            continue
        names = allowed.get(item.module)
        if names is None or (item.name is not None and item.name not in names):
            found.append(f"{module}:{item.line}: may not use {item.module}.{item.name or '*'}")
    return found


def modules() -> dict[str, Path]:
    """Every module of the packages by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def exported(path: Path) -> list[str]:
    """The literal __all__ of a package, or its imported names where it has none."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    return []


MODULES = modules()
PUBLIC = exported(MODULES["aserve"])
USABLE = frozenset(PUBLIC) | {"__version__"}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_its_layer_may(module: str) -> None:
    path = MODULES[module]
    source = path.read_text(encoding="utf-8")
    package = path.name == "__init__.py"
    assert violations(source, module, frozenset(MODULES), USABLE, package=package) == []


@pytest.mark.parametrize("module", MODULES)
def test_a_module_opens_with_a_docstring(module: str) -> None:
    assert ast.get_docstring(ast.parse(MODULES[module].read_text(encoding="utf-8")))


def test_the_layers_name_each_module_once_and_no_other() -> None:
    names = [entry for layer in LAYERS for entry in layer.modules]
    assert len(names) == len(set(names))
    assert {name.removesuffix(".*") for name in names} <= MODULES.keys()


def test_only_the_program_imports_routes() -> None:
    importers = {
        module
        for module, path in MODULES.items()
        for item in imports(path.read_text(encoding="utf-8"), module, package=path.name == "__init__.py")
        if item.module.split(".")[0] == "routes" and not module.startswith("routes")
    }
    assert importers <= {"aserve.cli", "aserve.__main__"}


@pytest.mark.parametrize("path", sorted((ROOT / "loadtest").glob("*.py")), ids=lambda path: path.name)
def test_the_load_test_knows_the_server_by_http_alone(path: Path) -> None:
    assert outsider_violations(path.read_text(encoding="utf-8"), path.stem, {}) == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_uses_public_names_only(path: Path) -> None:
    allowed = {"aserve": USABLE, "routes": frozenset(exported(MODULES["routes"]))}
    assert outsider_violations(path.read_text(encoding="utf-8"), path.stem, allowed) == []


PLANTED = {
    "words use a library": ("aserve.plan", "import msgspec"),
    "words look up": ("aserve.request", "from aserve.scheduler import Scheduler"),
    "pure imports torch": ("aserve.scheduler", "import torch"),
    "pure imports torch in a function": ("aserve.scheduler", "def f():\n    import torch.nn"),
    "pure imports asyncio": ("aserve.policy", "import asyncio"),
    "pure reads a clock": ("aserve.scheduler", "from time import monotonic"),
    "pure reads the date": ("aserve.metrics", "import datetime"),
    "pure knows the engine": ("aserve.admission", "from aserve import engine"),
    "pure knows it by a relative import": ("aserve.admission", "from . import engine"),
    "worker imports asyncio": ("aserve.worker.runner", "from asyncio import Event"),
    "worker imports anyio": ("aserve.worker.sampler", "import anyio.to_thread"),
    "worker knows the scheduler": ("aserve.worker.runner", "from aserve.scheduler import Scheduler"),
    "kernels import starlette": ("aserve_kernels.ops", "import starlette"),
    "kernels import aserve": ("aserve_kernels.ops", "from aserve.plan import StepPlan"),
    "engine knows a runner": ("aserve.engine", "from aserve.worker.runner import ModelRunner"),
    "engine imports its default executor eagerly": ("aserve.engine", "from aserve.executors.thread import X"),
    "engine imports torch": ("aserve.engine", "import torch"),
    "engine names a model under TYPE_CHECKING": (
        "aserve.engine",
        "if TYPE_CHECKING:\n    from aserve.models import Model",
    ),
    "stream builds an executor": ("aserve.stream", "def f():\n    from aserve.executors.thread import X"),
    "routes import torch": ("routes.app", "import torch"),
    "routes take a private module": ("routes.app", "from aserve.engine import Engine"),
    "routes take it by attribute": ("routes.app", "import aserve.engine"),
    "routes take a private name": ("routes.app", "from aserve import scheduler"),
    "a new module": ("aserve.surprise", ""),
}
PLANTED_KNOWN = frozenset(MODULES) | {
    "aserve",
    "aserve.admission",
    "aserve.engine",
    "aserve.executors.thread",
    "aserve.loading",
    "aserve.metrics",
    "aserve.models.files",
    "aserve.policy",
    "aserve.scheduler",
    "aserve.stream",
    "aserve.worker.runner",
    "aserve.worker.sampler",
    "routes.app",
    "routes.sse",
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_violation_is_found(case: str) -> None:
    module, source = PLANTED[case]
    assert len(violations(source, module, PLANTED_KNOWN, frozenset({"Engine"}))) == 1


ALLOWED = {
    "words use words": ("aserve.plan", "from aserve.request import SamplingParams"),
    "pure uses words": ("aserve.scheduler", "import heapq\nfrom aserve import plan\nfrom .request import Request"),
    "loading takes the default executor when an engine starts": (
        "aserve.loading",
        "def f():\n    from aserve.executors.thread import ThreadExecutor",
    ),
    "loading names a model's files for type checking": (
        "aserve.loading",
        "if TYPE_CHECKING:\n    from aserve.models.files import ModelFiles",
    ),
    "engine knows the protocol": ("aserve.engine", "import asyncio\nfrom aserve.executors import Executor"),
    "worker uses kernels": ("aserve.worker.runner", "import torch\nimport aserve_kernels"),
    "routes use public names": ("routes.app", "from aserve import Engine\nimport aserve\nfrom routes import sse"),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_an_allowed_import_passes(case: str) -> None:
    module, source = ALLOWED[case]
    assert violations(source, module, PLANTED_KNOWN, frozenset({"Engine"})) == []


def test_a_planted_private_import_outside_the_packages_is_found() -> None:
    allowed = {"aserve": frozenset({"Engine"})}
    assert outsider_violations("from aserve import Engine", "embed", allowed) == []
    assert len(outsider_violations("from aserve.engine import Engine", "embed", allowed)) == 1
    assert len(outsider_violations("from aserve import scheduler", "embed", allowed)) == 1
    assert len(outsider_violations("import aserve", "locustfile", {})) == 1
