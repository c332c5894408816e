"""Reads every model's source in the installed Transformers for expert classes that we do not know.

It fails, naming the classes, when a release brings a decorator flag, an expert parameter or an
undecorated expert class that the integration has not been taught.
"""

import ast
import importlib.util
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from transformers.integrations.moe import use_experts_implementation

from hotexperts.integrations.transformers.compat import (
    COMPUTES_IN_FLOAT32,
    KNOWN_DECORATOR_FLAGS,
    KNOWN_PARAMETERS,
    SHARED_EXPERTS,
    SUMS_IN_FLOAT32,
    SUMS_IN_WEIGHTS_DTYPE,
)

pytestmark = pytest.mark.transformers

DECORATOR = "use_experts_implementation"
KNOWN_FLAGS = KNOWN_DECORATOR_FLAGS | {"experts_class"}
# 3-D expert parameters outside the experts interface: each needs an adapter or is refused, but for
# shared experts, which need no cache.
KNOWN_UNDECORATED = {
    *SHARED_EXPERTS,
    "AriaGroupedExpertsGemm",  # until 5.17; Aria's experts are decorated later
    "JetMoeParallelExperts",
    "Llama4TextExperts",
    "LongcatFlashExperts",
    "Step3p7Experts",
}
TENSOR_MAKERS = {"empty", "ones", "rand", "randn", "zeros"}


@dataclass(frozen=True)
class ExpertsClass:
    """One class of the source: its decorator flags, and the dimensions of its parameters.

    `sum_dtype` is that in which its loop adds up, as written, where this is not the input's;
    `computes_in_float32` says that the loop casts what it multiplies.
    """

    name: str
    is_decorated: bool
    flags: frozenset[str] = frozenset()
    parameters: dict[str, int] = field(default_factory=dict)
    sum_dtype: str = ""
    computes_in_float32: bool = False


def scan(source: str) -> Iterator[ExpertsClass]:
    """Yields the decorated classes and those with `Experts` in their name."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef):
            continue
        decorators = [d for d in node.decorator_list if _last_name(d) == DECORATOR]
        if decorators or "Experts" in node.name:
            flags = (_flags(decorator) for decorator in decorators)
            yield ExpertsClass(
                node.name,
                bool(decorators),
                frozenset().union(*flags),
                _parameters(node),
                *_loop(node),
            )


def _last_name(node: ast.expr) -> str:
    """Returns `c` of `a.b.c`, `c` and `a.b.c(...)`; an empty string for anything else."""
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _flags(decorator: ast.expr) -> set[str]:
    if not isinstance(decorator, ast.Call):
        return set()
    return {keyword.arg or "**" for keyword in decorator.keywords}


def _parameters(node: ast.ClassDef) -> dict[str, int]:
    """Returns name -> dimensions (0 where unclear) of each `self.name = nn.Parameter(...)`."""
    found: dict[str, int] = {}
    inits = (n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    for statement in (s for init in inits for s in ast.walk(init)):
        if not isinstance(statement, ast.Assign | ast.AnnAssign):
            continue
        value = statement.value
        if isinstance(value, ast.Call) and _last_name(value) == "Parameter":
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            found.update((_last_name(target), _dimensions(value)) for target in targets)
    return found


def _loop(node: ast.ClassDef) -> tuple[str, bool]:
    """Returns the dtype that `forward` adds up in, and whether it calls `.float()`."""
    calls = [
        call
        for function in node.body
        if isinstance(function, ast.FunctionDef) and function.name == "forward"
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
    ]
    dtypes = {
        ast.unparse(keyword.value)
        for call in calls
        if _last_name(call) in ("zeros_like", "zeros", "new_zeros")
        for keyword in call.keywords
        if keyword.arg == "dtype"
    }
    dtype = " or ".join(sorted(dtypes - {"hidden_states.dtype"}))
    return dtype, any(_last_name(call) == "float" for call in calls)


def _dimensions(parameter: ast.Call) -> int:
    for call in ast.walk(parameter):
        if isinstance(call, ast.Call) and _last_name(call) in TENSOR_MAKERS:
            sizes = call.args
            if len(sizes) == 1 and isinstance(sizes[0], ast.Tuple | ast.List):
                sizes = sizes[0].elts
            return len(sizes)
    return 0


def unknown_parts(classes: list[ExpertsClass]) -> dict[str, set[str]]:
    """Returns class name -> flags and parameters of decorated classes that are not known."""
    unknown = {
        c.name: (c.flags - KNOWN_FLAGS) | (c.parameters.keys() - KNOWN_PARAMETERS)
        for c in classes
        if c.is_decorated
    }
    return {name: parts for name, parts in unknown.items() if parts}


def undecorated(classes: list[ExpertsClass]) -> set[str]:
    """Returns the undecorated classes that own a 3-D parameter."""
    return {c.name for c in classes if not c.is_decorated and 3 in c.parameters.values()}


@pytest.fixture(scope="module")
def installed() -> list[ExpertsClass]:
    package = importlib.util.find_spec("transformers")
    folder = Path(package.submodule_search_locations[0])
    files = sorted(folder.glob("models/*/modeling_*.py"))
    sources = (file.read_text(encoding="utf-8") for file in files)
    relevant = (source for source in sources if "Experts" in source or DECORATOR in source)
    return [found for source in relevant for found in scan(source)]


def test_decorated_classes_are_found(installed: list[ExpertsClass]):
    decorated = [c for c in installed if c.is_decorated]
    assert len(decorated) >= 50
    assert not [c.name for c in decorated if "down_proj" not in c.parameters]


def test_decorated_classes_hold_nothing_unknown(installed: list[ExpertsClass]):
    assert unknown_parts(installed) == {}


def test_undecorated_classes_are_known(installed: list[ExpertsClass]):
    assert undecorated(installed) - KNOWN_UNDECORATED == set()
    assert "Llama4TextExperts" in undecorated(installed)


def test_the_dtypes_of_their_sums_are_known(installed: list[ExpertsClass]):
    decorated = [c for c in installed if c.is_decorated]
    found = {c.name: c.sum_dtype for c in decorated if c.sum_dtype}
    known = {
        **dict.fromkeys(SUMS_IN_FLOAT32, "torch.float32"),
        **dict.fromkeys(SUMS_IN_WEIGHTS_DTYPE, "top_k_weights.dtype"),
    }
    assert {name: known.get(name) for name in found} == found
    assert {c.name for c in decorated if c.computes_in_float32} <= COMPUTES_IN_FLOAT32
    assert found["OpenAIPrivacyFilterExperts"]


def test_the_decorator_takes_no_unknown_flag():
    assert set(inspect.signature(use_experts_implementation).parameters) <= KNOWN_FLAGS


def test_the_scan_reports_what_it_does_not_know():
    source = """
@moe.use_experts_implementation(has_bias=True, has_wings=True, **more)
class BirdExperts(nn.Module):
    def __init__(self, config):
        self.down_proj: nn.Parameter = nn.Parameter(torch.empty(8, 4, 2))
        if config.feathers:
            self.feathers = torch.nn.Parameter(torch.ones((8, 4)))

class FishExperts(nn.Module):
    def __init__(self, config):
        self.weight = nn.Parameter(torch.zeros([8, 4, 2]))

    def forward(self, hidden_states, index, weights):
        total = torch.zeros_like(hidden_states, dtype=torch.float64)
        total += self.weight[index].float()

class FlatExperts(nn.Module):
    def __init__(self, config):
        self.weight = nn.Parameter(torch.zeros(8, 4))
"""
    classes = list(scan(source))
    assert unknown_parts(classes) == {"BirdExperts": {"has_wings", "**", "feathers"}}
    assert undecorated(classes) == {"FishExperts"}
    assert [(c.sum_dtype, c.computes_in_float32) for c in classes] == [
        ("", False),
        ("torch.float64", True),
        ("", False),
    ]
