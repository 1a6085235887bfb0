"""The axes of tensors as products of atoms: what stays apart, what is the same, and what was mixed.

Every axis of every tensor in a followed program is a list of atoms, from the outermost to the innermost. `view` regroups atoms
and splits them (an axis of 48 that is viewed as 6 x 8 turns out to be a product); element-wise operations, products and
attention find out that two atoms are the same one; a softmax, a norm or anything unknown mixes. An atom that is produced by
the rows of some weights, is never mixed, and is contracted by other weights is an axis of units.

    a packed projection of 6 heads of size 8:  [144] -> cut into [48 | 48 | 48] -> each is 6 x 8, and the three 6 are one atom
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod
from typing import Any, TypeAlias

import torch

Size: TypeAlias = "int | torch.SymInt"


class Atom:
    """A factor of an axis. Atoms that turn out to be the same share one root.

    Attributes:
        size: elements; symbolic where the axis is dynamic.
        mixed: whether an operation needs all of its elements at once.
        factors: the atoms whose product it turned out to be, the outermost first; None as long as it is whole.
        pieces: (start, atom) of the consecutive ranges that it was cut into; None as long as it is whole.
        stop: the operation that was the first to need all of them, or to cut them into pieces.
    """

    __slots__ = ("_parent", "factors", "mixed", "pieces", "size", "stop")

    def __init__(self, size: Size, *, mixed: bool = False) -> None:
        self.size = size
        self.mixed = mixed
        self.factors: list[Atom] | None = None
        self.pieces: list[tuple[int, Atom]] | None = None
        self.stop: Any = None
        self._parent: Atom | None = None

    @property
    def root(self) -> Atom:
        here = self
        while here._parent is not None:
            here = here._parent
        return here

    def become(self, other: Atom) -> None:
        """From now on this root is `other`."""
        self._parent = other

    def split(self, outer: int) -> list[Atom]:
        """Take this root for a product of `outer` and the rest."""
        assert isinstance(self.size, int)
        self.factors = [Atom(outer, mixed=self.mixed), Atom(self.size // outer, mixed=self.mixed)]
        for factor in self.factors:
            factor.stop = self.stop
        return self.factors


Axis: TypeAlias = list[Atom]
Axes: TypeAlias = list[Axis]


def whole_axis(size: Size) -> Axis:
    """An axis of which nothing is known yet; one of a single element has no atoms."""
    return [] if isinstance(size, int) and size == 1 else [Atom(size)]


def leaves(axis: Iterable[Atom]) -> list[Atom]:
    """The roots that cannot be taken apart further, the outermost first."""
    result: list[Atom] = []
    for atom in axis:
        root = atom.root
        if root.factors is None:
            result.append(root)
        else:
            result += leaves(root.factors)
    return result


def extent(axis: Iterable[Atom]) -> Size:
    """The number of elements of an axis."""
    return prod((atom.root.size for atom in axis), start=1)


def mix(axis: Iterable[Atom]) -> None:
    """All atoms of `axis` are needed at once."""
    for atom in leaves(axis):
        atom.mixed = True
        for _, piece in atom.pieces or ():
            mix([piece])


def unify(one: Iterable[Atom], other: Iterable[Atom]) -> None:
    """Both axes are the same: join their atoms, splitting the coarser ones. What does not fit is mixed."""
    left, right = leaves(one), leaves(other)
    # Example: a result of heads x size, (6, 8), meets an axis of 48. 48 is split into 6 x 8, and the factors are joined one by
    # one, so that heads are one axis in both. 6 and 4 do not fit: all of both is needed at once.
    while left and right:
        a, b = left[0], right[0]
        if a is b:
            left, right = left[1:], right[1:]
        elif _same(a.size, b.size):
            _join(a, b)
            left, right = left[1:], right[1:]
        elif isinstance(a.size, int) and isinstance(b.size, int) and a.pieces is None and a.size % b.size == 0:
            left = [*a.split(b.size), *left[1:]]
        elif isinstance(a.size, int) and isinstance(b.size, int) and b.pieces is None and b.size % a.size == 0:
            right = [*b.split(a.size), *right[1:]]
        else:
            break
    mix([*left, *right])


def _join(a: Atom, b: Atom) -> None:
    if a.pieces is not None and b.pieces is not None:
        if [start for start, _ in a.pieces] != [start for start, _ in b.pieces]:
            mix([a, b])
            return
        for (_, piece), (_, other) in zip(a.pieces, b.pieces, strict=True):
            unify([piece], [other])
    kept, gone = (a, b) if a.pieces is not None or b.pieces is None else (b, a)
    mixed = a.mixed or b.mixed
    gone.become(kept)
    kept.stop = kept.stop or gone.stop
    if mixed:
        mix([kept])


def _same(a: Size, b: Size) -> bool:
    """Whether two sizes are known to be equal. Comparing symbols by value would specialise the program."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return str(a) == str(b)


def _ratio(size: Size, part: Size) -> int | None:
    """How many times `part` goes into `size`; None where that is not a number: 6 for 6 s and s, None for 6 s and 1."""
    if isinstance(size, int) and isinstance(part, int):
        return size // part if size % part == 0 else 0
    ratio = size // part
    if isinstance(ratio, int):
        return ratio
    return int(ratio.node.expr) if ratio.node.expr.is_Integer else None


def cut(axis: Axis, start: int, stop: int) -> Axis:
    """The range `start <= i < stop` of an axis; an axis of several atoms is mixed by it, unless the range is all of it."""
    size = extent(axis)
    if start == 0 and _same(stop, size):
        return axis
    atoms = leaves(axis)
    if len(atoms) != 1 or not isinstance(size, int):
        mix(axis)
        return [Atom(stop - start, mixed=True)]
    atom = atoms[0]
    if atom.pieces is None:
        edges = sorted({0, start, stop, size})
        atom.pieces = [(a, Atom(b - a, mixed=atom.mixed)) for a, b in pairwise(edges)]
    for begin, piece in atom.pieces:
        length = extent([piece])
        assert isinstance(length, int)
        if begin <= start and stop <= begin + length:
            return [piece] if (begin, length) == (start, stop - start) else cut([piece], start - begin, stop - begin)
    mix(axis)
    return [Atom(stop - start, mixed=True)]


def put_together(axes: Sequence[Axis]) -> Axis:
    """The axis on which axes of known lengths lie one after the other."""
    pieces: list[tuple[int, Atom]] = []
    start = 0
    for axis in axes:
        size, factors = extent(axis), leaves(axis)
        assert isinstance(size, int)
        piece = factors[0] if len(factors) == 1 else Atom(size)
        if len(factors) > 1:
            piece.factors = factors
        pieces.append((start, piece))
        start += size
    whole = Atom(start)
    whole.pieces = pieces
    return [whole]


def parts_of(axis: Iterable[Atom]) -> list[list[Atom]]:
    """The leaves of each range that an axis was cut into, or put together of; all of its leaves where it was not."""
    found = leaves(axis)
    if len(found) != 1 or found[0].pieces is None:
        return [found]
    return [part for _, piece in found[0].pieces for part in parts_of([piece])]


def regroup(axes: Axes, sizes: Sequence[Size]) -> Axes:
    """The axes of a `view` with the given sizes; unknown ones where it cannot be told which atoms they are."""
    return regrouped(axes, sizes) or all_mixed(axes, sizes)


def regrouped(axes: Axes, sizes: Sequence[Size]) -> Axes | None:
    """The axes of a `view` with the given sizes: the same atoms, grouped again and split where an edge falls inside of one.

    None where that cannot be told.
    """
    left = [atom for axis in axes for atom in leaves(axis)]
    # (4, 6) viewed as (8, 3) is [4 2] and [3]: the 6 is split where an edge falls inside of it. (12, 5) viewed as (10, 6) is
    # None: 10 elements end inside of the 12 at no factor of it.
    result: Axes = []
    for size in sizes:
        axis: Axis = []
        while not _same(extent(axis), size):
            if not left:
                return None
            atom = left.pop(0)
            rest = _ratio(size, extent(axis))
            if isinstance(atom.size, int) and rest is not None and atom.size > rest:
                if rest < 1 or atom.size % rest or atom.pieces is not None:
                    return None
                outer, inner = atom.split(rest)
                left.insert(0, inner)
                atom = outer
            axis.append(atom)
        result.append(axis)
    return result if not left else None


def all_mixed(axes: Axes, sizes: Sequence[Size]) -> Axes:
    """The axes of a result of which nothing is known but its sizes; all of `axes` are needed for it."""
    for axis in axes:
        mix(axis)
    return [[Atom(size, mixed=True)] for size in sizes]


def places(axis: Iterable[Atom], atom: Atom) -> list[tuple[int, int]]:
    """Where the elements of `atom` lie on an axis: (start, inner) of each run.

    Element u of the atom is the range from start + u * inner to start + (u + 1) * inner of every run; three runs for the heads
    of a packed projection. Empty where the atom does not lie on the axis.
    """
    # Example: the 144 rows of queries, keys and values of 6 heads of size 8. A head lies on them as (0, 8), (48, 8), (96, 8):
    # head 2 has rows 16 to 23, 64 to 71 and 112 to 119.
    factors = [factor.root for factor in axis]
    result = []
    for index, factor in enumerate(factors):
        inside = _inside(factor, atom)
        if not inside:
            continue
        outer, inner, size = extent(factors[:index]), extent(factors[index + 1 :]), factor.size
        assert isinstance(outer, int)
        assert isinstance(inner, int)
        assert isinstance(size, int)
        result += [((repeat * size + start) * inner, run * inner) for repeat in range(outer) for start, run in inside]
    return result


def _inside(root: Atom, atom: Atom) -> list[tuple[int, int]]:
    if root is atom:
        return [(0, 1)]
    if root.factors is not None:
        return places(root.factors, atom)
    return [(begin + start, inner) for begin, piece in root.pieces or () for start, inner in places([piece], atom)]


def lies_on(axes: Iterable[Axis], atom: Atom) -> bool:
    """Whether `atom` is a part of one of the axes."""
    return any(atom in deep_leaves(axis) for axis in axes)


def deep_leaves(axis: Iterable[Atom]) -> list[Atom]:
    """`leaves`, with the pieces of those that were cut."""
    result = []
    for atom in leaves(axis):
        result.append(atom)
        for _, piece in atom.pieces or ():
            result += deep_leaves([piece])
    return result
