"""Every tensor that is made where a tiled run computes or sends says its device and its dtype.

A tensor made without a device lies on the CPU, and one without a dtype has whatever dtype is the default at that moment: either
shows only where a card is, which the machines of these tests need not have. So the text of the code is looked through.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tatami

SOURCE = Path(tatami.__file__).parent
PACKAGES = ("tiled", "comm", "parallel", "functions")

MAKERS = frozenset({
    "empty", "zeros", "ones", "full", "tensor", "arange", "eye", "rand", "randn", "randint", "randperm", "linspace", "logspace",
    "scalar_tensor", "empty_strided",
})  # fmt: skip
LIKE = frozenset({"new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"})
"""Methods of a tensor that is at hand, of whose device and dtype the new one is."""
HOST = frozenset({"frombuffer"})
"""Views of memory of the host, which have no other device; they need a dtype."""
NOT_COMPUTING = {"tiled/torch_norms.py": "a trial of torch's own functions, when tatami is loaded"}


def unsaid(source: str) -> list[tuple[int, str]]:
    """The line and the text of every tensor that is made without saying its device or its dtype."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = node.func.value, node.func.attr
        if not (isinstance(owner, ast.Name) and owner.id == "torch"):
            continue
        said = {keyword.arg for keyword in node.keywords}
        needed = {"dtype", "device"} if name in MAKERS else {"dtype"} if name in HOST else set()
        if needed - said and None not in said:
            found.append((node.lineno, ast.unparse(node)))
    return found


def files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (SOURCE / package).rglob("*.py"))


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_new_tensor_says_its_device_and_dtype(path: Path) -> None:
    if str(path.relative_to(SOURCE)) in NOT_COMPUTING:
        return
    lines = [f"{path.relative_to(SOURCE)}:{line}: {text}" for line, text in unsaid(path.read_text(encoding="utf-8"))]
    assert lines == [], "take device and dtype from a tensor that is at hand, or say device='cpu' where it is the host's"


def test_the_search_finds_what_it_is_for() -> None:
    source = """
a = torch.zeros(3)
b = torch.zeros(3, dtype=x.dtype)
c = torch.zeros(3, device=x.device)
d = torch.zeros(3, dtype=x.dtype, device=x.device)
e = x.new_zeros(3)
f = torch.zeros_like(x)
g = torch.arange(3, **kinds)
h = torch.frombuffer(data)
"""
    assert [line for line, _ in unsaid(source)] == [2, 3, 4, 9]


def test_what_is_left_out_is_there() -> None:
    assert all((SOURCE / name).is_file() for name in NOT_COMPUTING)


def test_host_memory_of_a_device_is_taken_in_one_place() -> None:
    """Nothing copies a device tensor to the host to send it, but the one file that says so."""
    pinning = [path for path in files() if "pin_memory" in path.read_text(encoding="utf-8")]
    assert [str(path.relative_to(SOURCE)) for path in pinning] == ["comm/staging.py"]
