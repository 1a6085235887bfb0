"""Bad and odd inputs for every option of every command: found in the commands' own signatures, the same in every run.

Nothing is drawn by chance. The values of a kind are dealt out in turn, so that every option gets some and every value comes up.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

VALUES_PER_OPTION = 3
LONG = 100_000


def split(values: str, *more: str) -> list[str]:
    """The values between the strokes, and more that are better computed."""
    return [*values.split("|"), *more]


WHOLE = [
    "-1",
    "0",
    "1",
    "1.5",
    "nan",
    "1e3",
    "",
    "x",
    *(str(2**bits) for bits in (31, 63, 64)),
    "9" * 30,
    "9" * 5000,
    "٣",
    " 2 ",
]
POINT = ["nan", "inf", "-inf", "-1", "0", "1e308", "1e-320", "1e999", "", "x", "1,5", "9" * 400, "٣"]
QUANTITY = split("1e308|nan|-5 s|1e30 GB||x|1 parsec|0|1e-300 s|5 m|1 GB|1 s|1e999 B|s", "9" * LONG)
NETS = split(
    "|x|9-9|64--10|64-0-10|64-80-10-|64-999999999-10|64-1.5-10|64-80-10|64-٣-10",
    *("64-" + "9" * 5000 + "-10", "-".join(["64", *["2"] * 2000, "10"]), "1" + "-1" * 999, "n" * LONG),
)
SPEEDS = split("|,|0,1|-1|nan,1|inf|1,,2|1e308,1e308|1e-308,1|1,1e-9|a,b|1 Gflop/s,2", "1" + ",1" * 5000, "9" * LONG)
HOSTS = split("|,|a:0|a b|a:1e9|-x|a:1,b:1|a,,b|ü|:4", "n" * LONG, "a:" + "9" * 30)
NAMES = split("|x|,|srpm,srpm|even,|../x|ring|checkpoint|\t|even|all|-|daly|mpi", "n" * LONG)
SWEEPS = split(
    "|x|=|mtbf|mtbf=|mtbf=1e308|rounds=nan|workers=-1|latency=1 parsec|every=0|samples=1.5|spares=-1|rounds=1,,2|iterations=0",
    *("nodes=" + "9" * 30, "x" * LONG),
)
EVENTS = split("|x|20s kill|-1s kill h0|1e308s kill h0|nan kill h0|1s speed h0 1e308|1s rate h0 0|1s kill h9|1s fly h0")
SLOWS = split("|x|p0:3|p0:nan@1s|p0:0@1s|p0:-1@1s|p0:3@iteration:x|p0:3@-1s|p9:3@1s|p0:1e308@1s|p0:3@iteration:0|p0:inf@0 s")
OUTPUTS = split(
    "/dev/full|/proc/there.png|/|.||nowhere/there.png|fifo|/dev/null/there.svg|dangling.png|there.txt|there.png|fifo.png|loop.svg",
    *("folder.png", "n" * 300 + ".png", "n" * LONG + ".png"),
)
FOLDERS = split("/dev/full|/proc/there|there.txt||fifo|dangling.png|/dev/null/there|there.txt/below|loop.svg", "n" * 300)
INPUTS = split(
    "nowhere|/dev/zero|/dev/stdin|fifo|.||empty.toml|binary.toml|deep.toml|deep.json|name.toml|large.toml|links.toml|badlinks.toml|"
    "count.toml|counts.toml|fast.toml|wide.toml|digits.toml|loop.svg|fifo.xml|empty.xml|groups.toml|nested.toml|report.json|"
    "cluster.toml|nan.toml|keys.toml|types.json",
    "n" * LONG,
)

BY_NAME = dict.fromkeys(
    split("sizes|latency|message|put|sum_|mtbf|server_mtbf|link_mtbf|detection|spawn|model|checkpoint"), QUANTITY
)
BY_NAME |= {"net": NETS, "speeds": SPEEDS, "hosts": HOSTS, "sweep": SWEEPS, "at": EVENTS, "slow": SLOWS}
BY_NAME |= dict.fromkeys(split("save|plot|output|log|report"), OUTPUTS)
BY_NAME |= dict.fromkeys(split("tensorboard|out|directory"), FOLDERS)
"""Texts and paths of special kinds, by the name of the option."""

BASES = {
    "doctor": ["--quick"],
    "plan": ["--speeds", "1,1"],
    "probe": ["-n", "2"],
    "run": ["-n", "2", "script.py"],
    "train": ["--iterations", "1"],
    "bench train": ["-n", "2"],
    "tune": ["--show"],
    "lab run": ["cluster.toml", "--", "true"],
    "lab check": ["cluster.toml"],
    "lab shell": ["h0", "--cluster", "cluster.toml"],
    "server train": ["script.py", "--rounds", "1"],
    "server resume": ["folder.png", "--script", "script.py"],
    "server report": ["report.json"],
    "simulate server": ["--preset", "oakforest-like", "--runs", "1", "--rounds", "1"],
    "simulate platform": ["--preset", "oakforest-like"],
    "simulate allreduce": ["--preset", "oakforest-like", "--nodes", "4"],
    "simulate tiling": ["--speeds", "1,1", "--iterations", "1"],
}
"""What each command is given beside, so that the one odd value is what decides."""

FILES = {
    "plan": [["plan", "{}"]],
    "train": [
        ["train", "--cluster", "{}"],
        ["train", "--load", "{}"],
        ["train", "--data", "nettalk", "--nettalk", "{}"],
        ["train", "--model", "gpt", "--samples", "1000000", "--text", "{}"],
    ],
    "lab check": [["lab", "check", "{}"]],
    "watch": [["watch", "--once", "{}"]],
    "examples": [["examples", "{}"]],
    "server": [
        ["server", "train", "{}"],
        ["server", "train", "script.py", "--cluster", "{}"],
        ["server", "resume", "{}"],
        ["server", "report", "{}"],
    ],
    "simulate": [
        ["simulate", "platform", "{}"],
        ["simulate", "tiling", "{}"],
        ["simulate", "server", "--platform", "{}", "--runs", "1"],
    ],
}
"""Every argument that is read as a file, for each of `INPUTS`."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """An option or argument, as its command declares it."""

    command: str
    name: str
    kind: Any
    flags: tuple[str, ...]


def fuzz_inputs(app: typer.Typer) -> Iterator[list[str]]:
    """Command lines, each with one odd value."""
    turns: dict[int, count[int]] = {}
    for parameter in parameters(app):
        values = values_of(parameter)
        turn = turns.setdefault(id(values), count())
        for number in islice(turn, VALUES_PER_OPTION):
            value = values[number % len(values)]
            base = BASES.get(parameter.command, [])
            yield [*parameter.command.split(), parameter.flags[-1], value, *base]
    for forms in FILES.values():
        for form in forms:
            some = [
                path for path in INPUTS if path != "links.toml" or form[:1] == ["plan"] or form[:2] == ["simulate", "platform"]
            ]
            yield from ([word.format(path) for word in form] for path in some)


def parameters(app: typer.Typer) -> Iterator[Parameter]:
    """Every option that takes a value, of every command."""
    for command, callback in commands(app):
        for name, hint in get_type_hints(callback, include_extras=True).items():
            kind, *infos = get_args(hint) or (None,)
            for info in infos:
                flags = tuple(info.param_decls or ()) or (f"--{name.replace('_', '-')}",)
                if isinstance(info, OptionInfo) and kind is not bool:
                    yield Parameter(command=command, name=name, kind=kind, flags=flags)
                assert isinstance(info, OptionInfo | ArgumentInfo)


def commands(group: typer.Typer, *, prefix: str = "") -> Iterator[tuple[str, Callable[..., object]]]:
    """Every command and its function, in the order of the program."""
    for command in group.registered_commands:
        assert command.callback is not None
        yield f"{prefix}{command.name or command.callback.__name__.replace('_', '-')}", command.callback
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from commands(inner.typer_instance, prefix=f"{inner.name} ")


def values_of(parameter: Parameter) -> list[str]:
    """Odd values for a parameter of its kind."""
    if parameter.name in BY_NAME:
        return BY_NAME[parameter.name]
    kinds = {
        parameter.kind,
        *get_args(parameter.kind),
        *(inner for each in get_args(parameter.kind) for inner in get_args(each)),
    }
    if int in kinds:
        return WHOLE
    if float in kinds:
        return POINT
    return INPUTS if Path in kinds else NAMES


def make_files() -> None:
    """What `INPUTS` and `OUTPUTS` name, in this folder."""
    os.mkfifo("fifo")
    os.mkfifo("fifo.png")
    os.mkfifo("fifo.xml")
    Path("folder.png").mkdir()
    Path("dangling.png").symlink_to("nowhere")
    Path("loop.svg").symlink_to("loop.svg")
    one = '[[processors]]\nname = "p"\nspeed = 1.0\nhost = "h{i}"\ncount = 2\n'
    link = '[[links]]\nhosts = ["{}", "{}"]\nbandwidth = "1 Gbit/s"\nlatency = "5 us"\n'
    many = '[[processors]]\nname = "p"\nspeed = 1.0\nhost = "h{i}"\ncount = 350\n'
    texts = {
        "there.txt": "mine",
        "there.png": "mine",
        "empty.toml": "",
        "empty.xml": "",
        "script.py": "model_fn = loss_fn = lambda *_: None\ndataset = ()\n",
        "deep.toml": "a = " + "[" * 5000 + "]" * 5000,
        "deep.json": "[" * LONG + "]" * LONG,
        "name.toml": f'[[processors]]\nname = "{"n" * LONG}"\nspeed = 1.0\n',
        "large.toml": one + "#" * (10 << 20),
        "links.toml": many + "".join(link.format(f"h{i}", f"h{j}") for i in range(350) for j in range(i)),
        "badlinks.toml": one + "".join(link.format(f"x{i}", f"y{i}") for i in range(5000)),
        "count.toml": one.replace("count = 2", "count = 1000000000"),
        "counts.toml": "".join(one.replace('"p"', f'"p{i}-"').replace("count = 2", "count = 200000") for i in range(20)),
        "fast.toml": one.replace("1.0", "1e308"),
        "nan.toml": one.replace("1.0", "nan"),
        "wide.toml": "[network]\nbandwidth = 1e308\nlatency = 1e308\n" + one,
        "digits.toml": "a = " + "9" * 5000,
        "groups.toml": '[[groups]]\nname = "g{i}"\ncount = 1000000000\n',
        "nested.toml": "".join(f'[[{".".join(["groups"] * depth)}]]\nname = "g"\n' for depth in range(1, 300)),
        "keys.toml": one + "".join(f"key{i} = 1\n" for i in range(5000)),
        "report.json": '{"recovery": "ignore", "failures": [], "reached_s": [], "losses": [], "warnings": []}',
        "types.json": '{"recovery": 3, "failures": [{}], "reached_s": ["x", null], "losses": {"a": 1}, "warnings": 7}',
        "cluster.toml": one,
    }
    for name, text in texts.items():
        Path(name).write_text(text, encoding="utf-8")
    Path("binary.toml").write_bytes(bytes(range(256)))
