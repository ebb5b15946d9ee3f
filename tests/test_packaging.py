"""What an installed aserve is: the wheel's contents, the declared versions, and imports that stay quick."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy of the sources, offline, with the environment's own setuptools."""
    source = tmp_path_factory.mktemp("source")
    for name in ("aserve", "aserve_kernels", "routes", "tests", "loadtest", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    target = tmp_path_factory.mktemp("wheel")
    build = "from setuptools.build_meta import build_wheel; import sys; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(target)], cwd=source, check=True, capture_output=True, timeout=100)
    return zipfile.ZipFile(next(target.glob("*.whl")))


def test_the_wheel_installs_three_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"aserve", "aserve_kernels", "routes"}


def test_the_wheel_carries_every_module_and_the_type_markers(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for package in ("aserve", "aserve_kernels", "routes"):
        files = [path for path in (ROOT / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        assert {str(path.relative_to(ROOT)) for path in files} <= names
    assert {"aserve/py.typed", "aserve_kernels/py.typed"} <= names


def test_the_wheel_names_its_licence_and_its_command(wheel: zipfile.ZipFile) -> None:
    info = next(name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name)
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    assert "aserve = aserve.__main__:main" in wheel.read(f"{info}/entry_points.txt").decode()


def test_the_version_has_a_changelog_entry() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{PYPROJECT['project']['version']}]" in changelog


def test_every_library_that_is_imported_is_declared() -> None:
    declared = [*PYPROJECT["project"]["dependencies"]]
    for extra in PYPROJECT["project"]["optional-dependencies"].values():
        declared += extra
    known = {re.split(r"[^\w.-]", line)[0].lower().replace("_", "-") for line in declared} | {"triton"}  # torch's own
    imported = set()
    for package in ("aserve", "aserve_kernels", "routes"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    imported.add(node.module.split(".")[0])
    imported -= {"aserve", "aserve_kernels", "routes", *sys.stdlib_module_names}
    sources = packages_distributions()
    missing = {
        name for name in imported if not known & {each.lower().replace("_", "-") for each in sources.get(name, [name])}
    }
    assert missing <= {"flash_attn"}  # flash-attn-4's; where it is not installed nobody knows


def loaded_by(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after the statement."""
    program = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


@pytest.mark.parametrize("statement", ["from aserve import *", "import aserve.cli"])
def test_an_import_does_not_pay_for_torch(statement: str) -> None:
    assert loaded_by(statement) & {"torch", "transformers", "triton"} == set()


def test_an_embedding_program_gets_no_web_server_with_the_engine() -> None:
    # sse-starlette patches uvicorn when it is imported: never by surprise.
    assert loaded_by("from aserve import *") & {"sse_starlette", "uvicorn", "starlette"} == set()


@pytest.mark.parametrize("script", sorted([*(ROOT / "scripts").iterdir(), ROOT / ".ci" / "run"]), ids=lambda p: p.name)
def test_a_script_can_be_run_and_parses(script: Path) -> None:
    assert os.access(script, os.X_OK) or script.suffix == ".py"
    text = script.read_text(encoding="utf-8")
    if text.startswith("#!/bin/sh"):
        subprocess.run(["sh", "-n", str(script)], check=True, timeout=10)
    else:
        compile(text, str(script), "exec")


def test_ci_runs_the_command_the_readme_gives() -> None:
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1] == "exec make test"
    assert "make test" in (ROOT / "README.md").read_text(encoding="utf-8")
