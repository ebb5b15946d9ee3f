"""The documents against the code: every parameter, route and option has its line, and every link its target."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aserve import Engine
from aserve.cli import _parser
from routes import create_app
from routes.response_body import ResponseBody
from routes.schemas import ChatBody, CompletionBody

ROOT = Path(__file__).resolve().parent.parent
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


FIELDS = {*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__, *ResponseBody.__struct_fields__}


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_a_parameter_is_documented(field: str) -> None:
    assert f"`{field}`" in API


def test_every_documented_parameter_exists() -> None:
    tables = API.split("## Parameters of both", 1)[1].split("## Tool calls", 1)[0]
    named = set(re.findall(r"^\| `(\w+)` \|", tables, re.MULTILINE))
    assert named <= FIELDS


def test_every_route_is_documented_and_no_other() -> None:
    routes = {
        (method, re.sub(r":\w+}", "}", route.path))
        for route in create_app(Engine()).routes
        for method in (getattr(route, "methods", None) or {"POST"}) - {"HEAD"}
    }
    documented = set(re.findall(r"^\| `([A-Z]+) (/\S*)` \|", API, re.MULTILINE))
    assert documented == routes


def test_every_module_of_the_framework_has_its_layer_in_the_architecture() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = text.split("| Layer | Modules |", 1)[1].split("\n\n", 1)[0]
    named = {word.removeprefix("aserve.") for code in re.findall(r"`([^`]+)`", table) for word in code.split()}
    assert {path.stem for path in (ROOT / "aserve").glob("*.py")} - named == {"__init__"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_link_leads_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8"))
    local = [target for target in targets if not target.startswith(("http://", "https://"))]
    assert [target for target in local if not (document.parent / target).exists()] == []


def test_every_option_the_readme_names_exists(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    with pytest.raises(SystemExit):
        _parser().parse_args(["serve", "--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    table = readme.split("| Option | Default |", 1)[1].split("\n\n", 1)[0]
    assert set(re.findall(r"`(--[a-z-]+)`", table)) <= options


def test_every_make_target_is_listed_in_phony() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony is not None and set(phony[1].split()) == targets
