"""What a message shows where a value would stand: <path>, the last name in its expression."""

from __future__ import annotations

import ast
import re


def place(expr: ast.AST) -> str:
    """It, in its marks."""
    return f"<{_named(expr)}>"


def fixed(text: str) -> str:
    """The text without its places."""
    return re.sub("<.*?>", "", text)


def _named(expr: ast.AST) -> str:
    if isinstance(expr, ast.FormattedValue):
        return _named(expr.value)
    if isinstance(expr, ast.Name):
        return expr.id.strip("_")
    if isinstance(expr, ast.Attribute):
        return "class" if expr.attr == "__name__" else expr.attr.strip("_")
    if isinstance(expr, ast.Subscript):
        key = getattr(expr.slice, "value", None)
        return key if isinstance(key, str) else _named(expr.value)
    if isinstance(expr, ast.Call):
        return _named_call(expr.func, expr.args)
    inner = next((n for n in ast.iter_child_nodes(expr) if isinstance(n, ast.expr)), None)
    return "…" if inner is None else _named(inner)


def _named_call(called: ast.expr, arguments: list[ast.expr]) -> str:
    if isinstance(called, ast.Attribute):
        key = getattr(arguments[0], "value", None) if arguments else None
        if called.attr == "get" and isinstance(key, str):
            return key
        if called.attr == "get" or (called.attr in dir(str) and called.attr != "join"):
            return _named(called.value)
    if not arguments:
        return _named(called)
    name = ast.unparse(called)
    counts = "number of " if name == "len" else ""
    return counts + _named(arguments[name == "getattr"])
