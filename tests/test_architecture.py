"""Structure of the packages: no import circle, files and functions of a readable size, modules that say what they are."""

from __future__ import annotations

import ast
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("compress", "export", "runtime")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MOST_LINES = 500
MOST_PARAMETERS = 8
MOST_SINGLE_USE = 64


def circles(graph: grimp.ImportGraph) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan, 1972); lazy and type-only imports count."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for imported in graph.find_modules_directly_imported_by(module):
            if imported not in number:
                visit(imported)
                lowest[module] = min(lowest[module], lowest[imported])
            elif imported in stack:
                lowest[module] = min(lowest[module], number[imported])
        if lowest[module] == number[module]:
            cut = stack.index(module)
            if len(stack) - cut > 1:
                found.append(sorted(stack[cut:]))
            del stack[cut:]

    for module in sorted(graph.modules):
        if module not in number:
            visit(module)
    return found


def test_circles_are_found() -> None:
    graph = grimp.ImportGraph()
    for importer, imported in (("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("d", "e"), ("f", "a")):
        for module in (importer, imported):
            graph.add_module(module)
        graph.add_import(importer=importer, imported=imported)
    assert circles(graph) == [["a", "b", "c"]]


def test_no_import_circle() -> None:
    assert circles(grimp.build_graph(*PACKAGES, cache_dir=None)) == []


def test_no_file_is_too_long() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert {path: lines for path, lines in lengths.items() if lines > MOST_LINES} == {}


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    names = [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def _launches(path: Path) -> bool:
    """Kernels and the functions that launch them take what the hardware takes."""
    rooms = {
        ROOT / "runtime" / "kernels",
        ROOT / "runtime" / "kv_cache" / "kernels",
        ROOT / "runtime" / "engines" / "cuda",
    }
    return bool(rooms & set(path.parents)) or path.is_relative_to(ROOT / "compress" / "core" / "native")


def test_files_that_one_module_imports_are_few() -> None:
    """Such a file is merged into its only importer, unless a registry lists it: the `__init__` of its room, or as "module:name"."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    packages = {module for module in graph.modules if not (ROOT / f"{module.replace('.', '/')}.py").exists()}
    importers = {module: graph.find_modules_that_directly_import(module) for module in graph.modules - packages}
    named = "".join(path.read_text() for path in (*FILES, ROOT / "pyproject.toml"))
    alone = [module for module, those in importers.items() if len(those) == 1 and not those & packages]
    found = [module for module in alone if f'"{module}:' not in named]
    assert len(found) <= MOST_SINGLE_USE, sorted(found)


def test_no_function_takes_too_much() -> None:
    # Python calls of users, by keyword
    rooms = ("compress/__init__.py", "compress/run/run.py", "compress/sweeps/run.py", "runtime/api/load.py")
    public = {ROOT / path for path in rooms}
    found = {}
    for path in FILES:
        if path.parent == ROOT / "compress" / "commands" or path in public or _launches(path):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = _parameters(node)
                if count > MOST_PARAMETERS:
                    found[f"{path.relative_to(ROOT)}:{node.name}"] = count
    assert found == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_say_what_they_are(package: str) -> None:
    asks = ("What ", "Which ", "How ", "Whether ", "Where ", "When ", "Why ", "Who ")
    wrong = []
    for path in FILES:
        if path.is_relative_to(ROOT / package):
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            if not text or text.startswith(asks):
                wrong.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0] if text else 'no docstring'}")
    assert wrong == []


def test_no_room_is_left_in_the_root_of_runtime() -> None:
    assert {path.name for path in (ROOT / "runtime").glob("*.py")} == {"__init__.py", "errors.py"}
    assert not (ROOT / "compress" / "pipeline").exists()


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _name(node: ast.expr) -> str:
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _public(nodes: list[ast.stmt]) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Public functions but overloads and `entry` kernels: a new docstring would change the hash of a kernel compiled ahead."""
    found = [node for node in nodes if isinstance(node, FUNCTIONS) and not node.name.startswith("_")]
    return [node for node in found if not {"overload", "entry"} & {_name(one) for one in node.decorator_list}]


def _undocumented(modules: dict[str, ast.Module]) -> list[str]:
    """Public definitions without a docstring; overrides of a documented method are exempt, bases are found by name."""
    classes: dict[str, list[ast.ClassDef]] = {}
    for tree in modules.values():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)

    def inherited(child: ast.ClassDef, method: str) -> bool:
        bases = [base for node in child.bases for base in classes.get(_name(node), []) if base is not child]
        own = (one for base in bases for one in _public(base.body) if one.name == method)
        return any(ast.get_docstring(one) for one in own) or any(inherited(base, method) for base in bases)

    missing = []
    for path, tree in modules.items():
        public = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        missing += [f"{path}: {one.name}" for one in [*public, *_public(tree.body)] if not ast.get_docstring(one)]
        for parent in public:
            methods = [one for one in _public(parent.body) if not ast.get_docstring(one)]
            missing += [f"{path}: {parent.name}.{one.name}" for one in methods if not inherited(parent, one.name)]
    return missing


def test_undocumented_definitions_are_found() -> None:
    source = """
class A:
    "a"
    def f(self): "f"
class B(A):
    def f(self): ...
    def g(self): ...
def h():
    def i(): ...
def _j(): ...
"""
    assert _undocumented({"m": ast.parse(source)}) == ["m: B", "m: h", "m: B.g"]


def test_public_definitions_have_docstrings() -> None:
    assert _undocumented({str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in FILES}) == []
