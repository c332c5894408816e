"""The package's source as syntax trees, and what a name in it stands for; nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

NAME = "hotexperts"
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module:
    """One file.

    Attributes:
        name: without the package's: "cache.turn"; "" for the package itself.
        tree: each node knows its `parent`.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.tree = ast.parse(path.read_text())
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                child.parent = node  # type: ignore[attr-defined]

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of them."""
        return list(ast.walk(self.tree))

    @cached_property
    def functions(self) -> dict[str, Function]:
        """By name, methods too; of equal names the first."""
        found = [node for node in self.nodes if isinstance(node, Function)]
        return {function.name: function for function in reversed(found)}

    @cached_property
    def constants(self) -> dict[str, ast.expr]:
        """What is assigned once and for all."""
        found = {}
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found[node.targets[0].id] = node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found |= {node.target.id: node.value} if node.value else {}
        return found

    @cached_property
    def imports(self) -> dict[str, str]:
        """Names that come from the package, and their full names without its own."""
        froms = [n for n in self.nodes if isinstance(n, ast.ImportFrom)]
        ours = [n for n in froms if n.module and n.module.split(".")[0] == NAME]
        return {
            alias.asname or alias.name: f"{node.module}.{alias.name}".removeprefix(f"{NAME}.")
            for node in ours
            for alias in node.names
        }


class Package:
    """All modules by name."""

    def __init__(self, folder: Path) -> None:
        self.modules: dict[str, Module] = {}
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join(part for part in parts if part != "__init__")
            self.modules[name] = Module(name, path)

    def home(self, module: Module, expr: ast.expr) -> tuple[Module, str] | None:
        """Where a name of this module, or of a module that it imports, is defined."""
        if isinstance(expr, ast.Attribute):
            if isinstance(expr.value, ast.Name) and expr.value.id == "self":
                return module, expr.attr
            if not isinstance(expr.value, ast.Name) or expr.value.id not in module.imports:
                return None
            other = self.modules.get(module.imports[expr.value.id])
            return (other, expr.attr) if other else None
        if not isinstance(expr, ast.Name):
            return None
        if expr.id not in module.imports:
            return module, expr.id
        place, _, name = module.imports[expr.id].rpartition(".")
        other = self.modules.get(place)
        return self.home(other, ast.Name(name)) if other else None

    def constant(self, module: Module, expr: ast.expr) -> tuple[Module, ast.expr] | None:
        """The value of a constant, and where it stands."""
        found = self.home(module, expr)
        if found is None or found[1] not in found[0].constants:
            return None
        return found[0], found[0].constants[found[1]]

    def function(self, module: Module, expr: ast.expr) -> tuple[Module, Function] | None:
        """The function that is called by this expression."""
        found = self.home(module, expr)
        if found is None or found[1] not in found[0].functions:
            return None
        return found[0], found[0].functions[found[1]]

    @cached_property
    def _calls_by_name(self) -> dict[str, list[tuple[Module, ast.Call]]]:
        found: dict[str, list[tuple[Module, ast.Call]]] = {}
        for module in self.modules.values():
            for node in module.nodes:
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                    name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                    found.setdefault(name, []).append((module, node))
        return found

    def calls(self, module: Module, function: Function) -> Iterator[tuple[Module, ast.Call]]:
        """Those of a function of this module, wherever they are."""
        for other, call in self._calls_by_name.get(function.name, ()):
            if self.home(other, call.func) == (module, function.name):
                yield other, call

    def items(self, module: Module, expr: ast.expr) -> list[tuple[ast.expr, ast.expr]] | None:
        """Keys and values of a dictionary that is a constant."""
        found = (module, expr) if isinstance(expr, ast.Dict) else self.constant(module, expr)
        if found is None or not isinstance(found[1], ast.Dict):
            return None
        pairs: list[tuple[ast.expr, ast.expr]] = []
        for key, value in zip(found[1].keys, found[1].values, strict=True):
            if key is not None:
                pairs.append((key, value))
            elif isinstance(value, ast.Call) and ast.unparse(value.func) == "dict.fromkeys":
                keys = self.sequence(found[0], value.args[0])
                pairs += [(ast.Constant(name), value.args[1]) for name in keys or ()]
            else:
                pairs += self.items(found[0], value) or []
        return pairs

    def sequence(self, module: Module, expr: ast.expr) -> list[str] | None:
        """The members of a list, tuple, set or dictionary of constants, in their order."""
        if isinstance(expr, ast.Call) and ast.unparse(expr.func) in ("sorted", "tuple", "list"):
            found = self.sequence(module, expr.args[0])
            return sorted(found) if found and ast.unparse(expr.func) == "sorted" else found
        if isinstance(expr, ast.Tuple | ast.List | ast.Set):
            members = [getattr(member, "value", None) for member in expr.elts]
            return [str(m) for m in members] if all(isinstance(m, str) for m in members) else None
        pairs = self.items(module, expr)
        if pairs is not None:
            return [str(getattr(key, "value", "")) for key, _ in pairs]
        known = self.constant(module, expr)
        return self.sequence(*known) if known else None


def parents(node: ast.AST) -> Iterator[ast.AST]:
    """What encloses a node, from the inside."""
    while hasattr(node, "parent"):
        node = node.parent
        yield node


def returned(function: Function) -> list[ast.expr]:
    """What a function's own returns give, without those of functions inside."""
    found = [n for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None]
    return [
        n.value
        for n in found
        if n.value is not None
        and next(p for p in parents(n) if isinstance(p, Function)) is function
    ]
