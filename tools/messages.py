"""Every message of our errors, read from the source: no error has to be raised for it.

An f-string's fixed words stay, and so does what the source itself says elsewhere: constants, what
a function of ours returns, sentences that callers pass. Anything else becomes a place: <path>.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

from places import fixed, place
from sources import Function, Module, Package, parents, returned

FOLDER = Path(__file__).parent.parent / "src/hotexperts"
ROOTS = {"HotExpertsError", "Refusal"}  # an error of ours is one of them, or extends one
SPEAKERS = {("cli.console", "_message")}  # gives other packages' errors our words
_MOST_CHOICES = 4  # of short words; more say less than the name of their place
_DEPTH = 6  # of callers, and of functions that are called
_Words = dict[str, str]  # what names stand for


class Message(NamedTuple):
    """One way in which an error can be worded.

    Attributes:
        module: where, without the package's name: "cache.turn".
        error: its class; "" for another package's.
        text: the words.
        status: of HTTP, for an answer of the server.
    """

    module: str
    error: str
    text: str
    status: int | None = None


def messages(folder: Path = FOLDER) -> list[Message]:
    """Those of all modules, by module and in the order of the source, each once."""
    reader = _Reader(Package(folder))
    return list(dict.fromkeys(found for module in reader.modules for found in reader.read(module)))


class _Reader:
    def __init__(self, package: Package) -> None:
        self.package = package
        self.modules = list(package.modules.values())
        classes = {n.name: n for m in self.modules for n in m.nodes if isinstance(n, ast.ClassDef)}
        names = set(ROOTS)
        for _ in range(_DEPTH):
            names |= {n for n, c in classes.items() if names & {ast.unparse(b) for b in c.bases}}
        self.errors = {name: classes[name] for name in names if name in classes}

    def read(self, module: Module) -> Iterator[Message]:
        """The messages of one module."""
        for node, error, said, status in sorted(self._said(module), key=lambda s: s[0].lineno):
            for words in self._settings(module, node, said):
                for text in self._choices(module, said, words, 0) or []:
                    if re.search("[a-z]", fixed(text)):
                        yield Message(module.name, error, " ".join(text.split()), status)

    def _said(self, module: Module) -> Iterator[tuple[ast.AST, str, ast.expr, int | None]]:
        for node in module.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                error = node.func.id
                if error == "Refusal" and isinstance(node.args[0], ast.Constant):
                    yield node, error, node.args[1], node.args[0].value
                elif error in self.errors and not self._own_words(error):
                    yield node, error, node.args[0], None
            elif isinstance(node, ast.ClassDef) and node.name in self.errors:
                for said in self._own_words(node.name):
                    yield node, node.name, said, None
            elif isinstance(node, Function) and (module.name, node.name) in SPEAKERS:
                for said in returned(node):
                    if isinstance(said, ast.JoinedStr):
                        yield said, "", said, None

    def _own_words(self, error: str) -> list[ast.expr]:
        """What a class says that words its message itself."""
        calls = [n for n in ast.walk(self.errors[error]) if isinstance(n, ast.Call)]
        said = [c.args[0] for c in calls if ast.unparse(c.func) == "super().__init__" and c.args]
        return [words for words in said if isinstance(words, ast.JoinedStr)]

    def _settings(
        self, module: Module, node: ast.AST, said: ast.AST, depth: int = 0
    ) -> list[_Words]:
        """What names stand for: one for each caller with a sentence, and each turn of a loop."""
        found: list[_Words] = [{}]
        used = {n.id for n in ast.walk(said) if isinstance(n, ast.Name)}
        for scope in parents(node):
            outer: list[_Words] = []
            if isinstance(scope, Function) and depth < _DEPTH:
                outer = self._callers(module, scope, used, depth)
            elif isinstance(scope, ast.For):
                outer = self._turns(module, scope.target, scope.iter)
            elif isinstance(scope, ast.DictComp):
                outer = self._turns(module, scope.generators[0].target, scope.generators[0].iter)
            found = [{**far, **near} for near in found for far in outer or [{}]]
        return found

    def _callers(
        self, module: Module, function: Function, used: set[str], depth: int
    ) -> list[_Words]:
        names = [a.arg for a in function.args.args if a.arg not in ("self", "cls")]
        found = []
        for other, call in self.package.calls(module, function) if used & set(names) else ():
            given = dict(zip(names, call.args, strict=False))
            given |= {word.arg: word.value for word in call.keywords if word.arg in names}
            for words in self._settings(other, call, call, depth + 1):
                passed = {
                    name: self._part(other, value, words, depth + 1)
                    for name, value in given.items()
                    if name in used
                }
                found += [
                    dict(zip(passed, texts, strict=True)) for texts in product(*passed.values())
                ]
        return [words for words in found if any(_is_sentence(text) for text in words.values())]

    def _turns(self, module: Module, target: ast.expr, over: ast.expr) -> list[_Words]:
        """The pairs of `for name, value in ...`, of a constant's items or a function's yields."""
        if not isinstance(target, ast.Tuple) or not isinstance(over, ast.Call):
            return []
        pairs: list[tuple[Module, tuple[ast.expr, ...]]] = []
        if isinstance(over.func, ast.Attribute) and over.func.attr == "items":
            items = self.package.items(module, over.func.value) or []
            pairs = [(module, pair) for pair in items]
        else:
            pairs = list(self._yields(module, over.func))
        names = [ast.unparse(name) for name in target.elts]
        rows = ([self._part(home, v, {}, 0)[0] for v in pair] for home, pair in pairs)
        return [dict(zip(names, row, strict=True)) for row in rows]

    def _yields(
        self, module: Module, called: ast.expr
    ) -> Iterator[tuple[Module, tuple[ast.expr, ...]]]:
        found = self.package.function(module, called)
        for node in ast.walk(found[1]) if found else ():
            if found and isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple):
                yield found[0], tuple(node.value.elts)
            elif found and isinstance(node, ast.YieldFrom) and isinstance(node.value, ast.Call):
                yield from self._yields(found[0], node.value.func)

    def _choices(
        self, module: Module, expr: ast.expr, words: _Words, depth: int
    ) -> list[str] | None:
        """The texts that an expression can be; None where the source does not say."""
        if depth > _DEPTH:
            return None
        if isinstance(expr, ast.Constant):
            number = isinstance(expr.value, float)
            return [f"{expr.value:g}" if number else str(expr.value)]
        if isinstance(expr, ast.JoinedStr | ast.BinOp):
            parts = expr.values if isinstance(expr, ast.JoinedStr) else [expr.left, expr.right]
            if isinstance(expr, ast.BinOp) and not _joins_texts(expr):
                return None
            texts = [self._part(module, part, words, depth) for part in parts]
            return ["".join(found) for found in product(*texts)]
        if isinstance(expr, ast.IfExp | ast.BoolOp):
            ways = expr.values if isinstance(expr, ast.BoolOp) else [expr.body, expr.orelse]
            return [text for way in ways for text in self._part(module, way, words, depth)]
        if isinstance(expr, ast.Call):
            return self._of_call(module, expr, words, depth)
        if isinstance(expr, ast.Name):
            return [words[expr.id]] if expr.id in words else self._assigned(module, expr, depth)
        known = self.package.constant(module, expr)
        return self._choices(*known, {}, depth + 1) if known else None

    def _part(self, module: Module, expr: ast.expr, words: _Words, depth: int) -> list[str]:
        """The texts of a part of a message: sentences, or a few words at once, or a place."""
        value = expr.value if isinstance(expr, ast.FormattedValue) else expr
        found = list(dict.fromkeys(self._choices(module, value, words, depth) or []))
        if isinstance(value, ast.Constant):
            return found
        if any(_is_sentence(text) for text in found):
            return found
        if not found or not all(re.search(r"\w", fixed(text)) for text in found):
            return [place(value)]
        if len(found) > 1 and (len(found) > _MOST_CHOICES or "<" in "".join(found)):
            return [place(value)]
        is_quoted = isinstance(expr, ast.FormattedValue) and expr.conversion == ord("r")
        if is_quoted and "<" not in found[0]:
            found = [repr(text) for text in found]
        return ["/".join(found)]

    def _of_call(
        self, module: Module, call: ast.Call, words: _Words, depth: int
    ) -> list[str] | None:
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Constant):
            members = self.package.sequence(module, call.args[0])  # ", ".join(...)
            return [str(call.func.value.value).join(members)] if members else None
        if isinstance(call.func, ast.Attribute) and call.func.attr == "get" and len(call.args) == 2:
            return self._looked_up(module, call.func.value, call.args, words, depth)
        found = self.package.function(module, call.func)
        if found is None:
            return None
        home, function = found
        names = [a.arg for a in function.args.args if a.arg not in ("self", "cls")]
        given = {
            n: self._part(module, v, words, depth)[0]
            for n, v in zip(names, call.args, strict=False)
        }
        texts = [self._choices(home, said, given, depth + 1) for said in returned(function)]
        return None if None in texts or not texts else [t for some in texts for t in some or ()]

    def _looked_up(
        self,
        module: Module,
        table: ast.expr,
        arguments: list[ast.expr],
        words: _Words,
        depth: int,
    ) -> list[str] | None:
        """The value of a constant dictionary, or all of them where the key is not known."""
        key, default = (self._part(module, value, words, depth) for value in arguments)
        items = self.package.items(module, table)
        if items is None:
            return None
        found = {
            name: self._part(module, v, {}, depth)
            for n, v in items
            for name in self._part(module, n, {}, depth)
        }
        if "<" not in key[0]:
            return found.get(key[0], default)
        return [text for texts in (*found.values(), default) for text in texts]

    def _assigned(self, module: Module, name: ast.Name, depth: int) -> list[str] | None:
        """What is assigned to a name in its function, or in the module."""
        scopes = [scope for scope in parents(name) if isinstance(scope, Function)]
        for node in (node for scope in scopes for node in ast.walk(scope)):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name.id:
                return self._choices(module, node.value, {}, depth + 1)
        parameters = {a.arg for scope in scopes for a in scope.args.args + scope.args.kwonlyargs}
        known = None if name.id in parameters else self.package.constant(module, name)
        return self._choices(*known, {}, depth + 1) if known else None


def _joins_texts(expr: ast.expr) -> bool:
    """Whether it is a text, or a sum of which one is."""
    if isinstance(expr, ast.BinOp):
        return isinstance(expr.op, ast.Add) and any(map(_joins_texts, (expr.left, expr.right)))
    return isinstance(getattr(expr, "value", None), str) or isinstance(expr, ast.JoinedStr)


def _is_sentence(text: str) -> bool:
    return " " in fixed(text).strip()
