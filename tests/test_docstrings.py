"""Docstrings of public names: each has one, and says the shapes of tensors, the units of numbers, and all of its arguments.

The source is read and nothing is imported, so that this takes a second.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "tatami"
UNIT = re.compile(
    r"_(s|ms|bytes|flop|per_s|bytes_per_s|flop_per_s|fraction|share|in|px|pt|percent)$|^(bytes|flop|seconds|samples|units)$"
)
SHAPE = re.compile(r"\([^()]*,[^()]*\)|shape|scalar|one number|(a|of|the) vector", re.IGNORECASE)
Function = ast.FunctionDef


def exported(package: Path) -> set[str]:
    """The names that `package` hands out: its strings and imports are all that its `__init__` consists of."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names}
    return names


def public_nodes() -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Where each public function and class is defined, and its node."""
    top = exported(SOURCE)
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).parts
        names = top | (exported(SOURCE / parts[0]) if len(parts) > 1 else set())
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, Function | ast.ClassDef) and node.name in names and not is_overload(node):
                yield f"{path.relative_to(SOURCE)}:{node.lineno}: {node.name}", node


def is_overload(node: Function | ast.ClassDef) -> bool:
    """Or a setter: the docstring is at the other definition."""
    return any(ast.unparse(each).split(".")[-1] in ("overload", "setter") for each in node.decorator_list)


def methods(node: ast.ClassDef) -> Iterator[Function]:
    for each in node.body:
        is_public = isinstance(each, Function) and (each.name == "__init__" or not each.name.startswith("_"))
        if is_public and isinstance(each, Function) and not is_overload(each):
            yield each


def arguments(node: Function) -> list[ast.arg]:
    found = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [each for each in found if each.arg not in ("self", "cls") and not each.arg.startswith("_")]


def documented_methods() -> set[str]:
    """Names of methods that some class documents: those that override them have that docstring."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py"))
    classes = (node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    return {method.name for node in classes for method in methods(node) if ast.get_docstring(method)}


def is_told(name: str, text: str) -> bool:
    """Whether `text` has an entry of the argument, or speaks of it."""
    return re.search(rf"^ *(\*{{0,2}}\w+, )*\*{{0,2}}{name}(, \*{{0,2}}\w+)*:|`{name}`", text, re.MULTILINE) is not None


def faults(where: str, node: Function, text: str, *, around: str = "") -> Iterator[str]:
    """What the docstring `text` leaves out; `around` is that of the class, which may speak for all of its methods."""
    for each in arguments(node):
        kind = "" if each.annotation is None else ast.unparse(each.annotation)
        if "Callable" in kind or "Mapping" in kind:
            continue
        if re.search(r"\bTensor\b", kind) and not SHAPE.search(text) and "any shape" not in around:
            yield f"{where}({each.arg}): the docstring tells no shape"
        if re.search(r"\bfloat\b", kind) and not UNIT.search(each.arg) and not is_told(each.arg, text):
            yield f"{where}({each.arg}): neither the name nor the docstring tells a unit"
        if re.search(r"^ *Args:", text, re.MULTILINE) and not is_told(each.arg, text):
            yield f"{where}({each.arg}): is not among the arguments"


def all_faults() -> Iterator[str]:
    told = documented_methods()
    for where, node in public_nodes():
        text = ast.get_docstring(node) or ""
        if not text:
            yield f"{where}: has no docstring"
        if isinstance(node, Function):
            yield from faults(where, node, text)
            continue
        for method in methods(node):
            own = ast.get_docstring(method) or ""
            if method.name == "__init__":
                own = text + "\n" + own
            elif not own and arguments(method) and not (node.bases and method.name in told):
                yield f"{where}.{method.name}: has no docstring"  # one that is overridden has that of its base
            if own:
                yield from faults(f"{where}.{method.name}", method, own, around=text)


def test_public_names_tell_shapes_units_and_all_arguments() -> None:
    assert list(all_faults()) == []


def test_what_is_left_out_is_found() -> None:
    source = '''
def f(x: torch.Tensor, rate: float, wait_s: float, other: int):
    """Does it.

    Args:
        x: the input.
    """
'''
    (node,) = ast.parse(source).body
    assert isinstance(node, Function)
    said = [each.partition(": ")[2] for each in faults("f", node, ast.get_docstring(node) or "")]
    assert said == [
        "the docstring tells no shape",
        "neither the name nor the docstring tells a unit",
        "is not among the arguments",
        "is not among the arguments",
        "is not among the arguments",
    ]
    assert list(faults("f", node, "Of `x` (samples, units), at `rate` a second, and `other`, after `wait_s`.")) == []


def test_no_docstring_is_a_fragment() -> None:
    begins = re.compile(r'^\s*"""(Of|That|Those|What of|In which|By which|After which)\b', re.MULTILINE)
    found = {path.name: begins.findall(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}
    assert "tile.py" in found
    assert {name: words for name, words in found.items() if words} == {}
