"""The page of a run: what it reads, shows and leaves out."""

import json
import math
import re
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from page_rig import PAYLOAD, a_run, hostile, recorded, tiling_record
from torch import nn
from typer.testing import CliRunner

from tatami.cli.app import app
from tatami.cluster import Cluster, Processor
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError, MissingExtraError, OutputExistsError, TatamiError
from tatami.planning import plan
from tatami.records import Records
from tatami.report import page as page_package
from tatami.report.page import LARGEST_PAGE_BYTES, RecordedRun, joined, page_of, read_run, write_page
from tatami.report.page.charts import charts_of
from tatami.report.page.record_shapes import PHASES
from tatami.report.page.run_facts import facts_of, thinned
from tatami.report.palette import PHASES as PHASES_SHOWN
from tatami.report.palette import RANKS
from tatami.retiling import Retiler
from tatami.runtime.phases import PhaseTimes
from tatami.tiling import link_bytes, traffic_of
from tatami.train import Trainer
from tatami.train.recording import RunRecorder
from tatami.workload import Workload
from tiled_rig import some_layouts, tiled

SGD = partial(torch.optim.SGD, lr=0.1)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def test_logs_of_before_are_read_with_the_names_of_today(tmp_path: Path) -> None:
    now, before = tmp_path / "now.jsonl", tmp_path / "before.jsonl"
    now.write_text(text := "".join(json.dumps(record) + "\n" for record in a_run()))
    for today, old in (("tensor_parallel_s", "vertical_s"), ("gradients_s", "horizontal_s"), ('"replica"', '"column"')):
        assert today in text
        text = text.replace(today, old)
    before.write_text(text)
    assert read_run(before) == read_run(now)


def test_the_facts_are_those_of_the_records() -> None:
    facts = facts_of(recorded(a_run()))
    assert facts.ranks == ["p0", "p1", "p2", "p3"]
    assert [(step["iteration"], step["tiles"]) for step in facts.steps] == [(0, 4), (40, 4), (80, 4), (120, 4)]
    areas = [
        sum((row["x2"] - row["x1"]) * (row["y2"] - row["y1"]) for row in facts.tiles if row["step"] == n) for n in range(4)
    ]
    assert areas == [60 * 120] * 4
    # 10 iterations took 0.02 s of rank 1 in each phase: 2 ms of an iteration, under every tiling.
    assert [row["ms"] for row in facts.phases if row["rank"] == "p1"] == pytest.approx([2.0] * 4 * len(PHASES))
    assert len(facts.phases) == 4 * 4 * len(PHASES)
    assert [row["loss"] for row in facts.losses][:3] == [pytest.approx(0.3), None, pytest.approx(0.1)]
    assert [row["speed"] for row in facts.speeds if row["rank"] == "p3"][-1] == pytest.approx(0.3)
    assert (facts.num_checks, [row["iteration"] for row in facts.decisions]) == (19, [40, 80, 120])
    assert facts.deaths == [
        {
            "when": "12.3 s, iteration 150",
            "what": "p2 died",
            "repair": "the open step was done again; 3 ranks go on; 66 units moved",
            "lost": "0.31 s",
        }
    ]
    sent = a_run()[1]["sent_bytes"]
    assert {(row["source"], row["target"]): row["size_bytes"] for row in facts.links if row["step"] == 0} == {
        (source, target): size for source, targets in sent.items() for target, size in targets.items()
    }


def test_bytes_by_link_add_up_to_the_traffic() -> None:
    cluster, workload = Cluster.from_speeds([1, 1, 0.5]), Workload.mlp(20, 120, 10, samples=60)
    names = list(cluster.speeds)
    for planner in ("grid", "srpm", "weighted"):
        tiling = plan(planner, cluster=cluster, workload=workload).tiling
        traffic = traffic_of([tiling], workload=workload, names=names, hosts={name: name for name in names})
        links = link_bytes(traffic)
        assert sum(sum(targets.values()) for targets in links.values()) == traffic.size_bytes > 0
        assert all(source not in targets for source, targets in links.items())


def test_the_page_has_all_of_it_is_small_and_escapes_what_it_is_told() -> None:
    text = page_of(recorded(a_run()), title="a <run>")
    assert len(text.encode()) < LARGEST_PAGE_BYTES
    assert "<title>a &lt;run&gt;</title>" in text
    assert "slow &lt;/script&gt;&lt;b&gt; at 40" in text
    assert "default-src 'none'" in text
    assert not re.search(r'<(?:link|script|img|iframe)[^>]*(?:src|href)="(?!data:)', text.partition("<script")[0])
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert set(data["charts"]) == {"floor", "phases", "loss", "rate", "speeds", "links"}
    assert data["charts"]["floor"]["params"] == [{"name": "step", "value": 0}]
    for said in ("p2 died", "3 ranks go on", 'type="range" min="0" max="3"', "checked 19 times", "20-120-10"):
        assert said in text


def test_the_script_reads_what_the_facts_have_of_a_tiling() -> None:
    script = (Path(page_package.__file__).parent / "page.js").read_text(encoding="utf-8")
    read = set(re.findall(r"\bstep\.(\w+)", script))
    assert "iteration" in read
    assert read <= facts_of(recorded(a_run())).steps[0].keys()


def test_charts_show_a_single_record_and_name_no_phase_without_time() -> None:
    records = [record for record in a_run() if record["event"] != "train"]
    for record in records:
        for times in record["ranks"].values() if record["event"] == "phases" else ():
            times["tensor_parallel_s"] = 0.0
    one = {"event": "train", "iteration": 10, "epoch": 0, "loss": 3.445, "samples_per_s": 100.0}
    charts = charts_of(facts_of(recorded([*records, one])))
    words = charts["phases"]["encoding"]["color"]["scale"]["domain"]
    assert words == [word for name, (word, _) in PHASES_SHOWN.items() if name != "tensor_parallel"]
    for name in ("loss", "rate"):
        assert charts[name]["layer"][0]["mark"]["point"], "a line of one point is not seen"
    assert charts["loss"]["layer"][0]["encoding"]["y"]["axis"]["format"] == ".4~g"
    several = charts_of(facts_of(recorded([*records, one, {**one, "iteration": 20, "loss": 2.0}])))
    assert "format" not in several["loss"]["layer"][0]["encoding"]["y"]["axis"]


def elements(page: str) -> list[tuple[str, list[str]]]:
    """The elements of a page, each with the names of its attributes, as a parser finds them."""
    found: list[tuple[str, list[str]]] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.append((tag, [name for name, _ in attrs]))

    Parser().feed(page)
    return found


def test_no_name_reason_or_setting_of_the_records_becomes_an_element() -> None:
    benign, evil = a_run(), hostile(a_run())
    page = page_of(recorded(evil), title=f"run {PAYLOAD}")
    assert elements(page) == elements(page_of(recorded(benign), title="run"))
    data = page.partition('id="data">')[2].partition("</script>")[0]
    assert not set("<>&\u2028") & set(data)
    assert json.loads(data)["charts"]["floor"]["data"]["values"][0]["rank"] == f"p0{PAYLOAD}"
    assert PAYLOAD not in page
    assert page.count("onerror") > 20
    assert page_of(recorded(benign), title="half a letter \ud800").count("half a letter ?") == 2


def test_records_of_a_long_run_of_many_ranks_fit_and_the_page_tells_what_it_left_out() -> None:
    speeds = [1.0 + rank % 3 for rank in range(48)]
    one = tiling_record(0, speeds, why="moved")
    records = [{**one, "iteration": number} for number in range(400)]
    train = [{"event": "train", "iteration": number, "epoch": 0, "loss": 1.0, "samples_per_s": 1.0} for number in range(30_000)]
    text = page_of(recorded([*records, *train]), title="long")
    assert len(text.encode()) < LARGEST_PAGE_BYTES
    assert "Of 400 tilings, 125 are shown" in text
    assert "Of 30,000 records of the loss, 1,500 are shown" in text
    assert thinned(range(10), 4) == [0, 3, 6, 9]


def test_alarms_and_what_was_lost_against_prices_are_shown_of_a_run_that_is_watched() -> None:
    alarm = {"what": "the link h0 - h1", "at": 33, "began": 31, "slower": 2.5, "error": 0.04}
    watch = {"event": "watch", "speeds": {"p0": 1.0, "p1": 0.5}, "num_alarms": 1, "price_s": {"re-map whole": 0.5, "free": 0.0}}
    records = [
        {**watch, "iteration": 33, "lost_s": {"re-map whole": 0.1, "free": 0.0}, "alarms": [alarm]},
        {**watch, "iteration": 40, "lost_s": {"re-map whole": 0.4, "free": 0.0}, "alarms": []},
    ]
    facts = facts_of(recorded([*a_run(), *records]))
    assert [(row["iteration"], row["what"]) for row in facts.alarms] == [(33, "the link h0 - h1")]
    assert [(row["iteration"], row["share"]) for row in facts.accounts] == [(33, 0.2), (40, 0.8)]
    assert {row["speed"] for row in facts.speeds if row["iteration"] == 33} == {1.0, 0.5}
    text = page_of(recorded([*a_run(), *records]), title="watched")
    for said in ("<h2>Alarms</h2>", "2.50 (+- 4%)", "the link h0 - h1", "Time lost, compared with the price of moving"):
        assert said in text
    assert "Triangles: alarms." in text
    assert "accounts" in charts_of(facts)


def test_what_an_older_log_lacks_is_said() -> None:
    old = [{"event": "train", "iteration": 10, "epoch": 1, "loss": 1.0, "samples_per_s": 5.0}]
    assert set(charts_of(facts_of(recorded(old)))) == {"loss", "rate"}
    text = page_of(recorded(old), title="old")
    assert "Not recorded: tiling, time of each rank by phase, bytes by link, speeds of the ranks, decisions." in text


def test_logs_of_the_parameter_server_and_reports_of_elastic_runs_are_read(tmp_path: Path) -> None:
    failure = {"who": "worker 1", "process": "worker", "how": "died", "at_s": 2.0, "silent_s": None}
    lines = [{"event": "round", "iteration": 1, "at_s": 0.1, "loss": 2.0}, {"event": "failure", "iteration": 2, **failure}]
    log = tmp_path / "server.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"event": "rou', encoding="utf-8")
    run = read_run(log)
    facts = facts_of(run)
    assert run.cut_off
    assert facts.notes == ["The last line of the records ends in the middle and is left out: the run was killed as it wrote."]
    assert ([row["loss"] for row in facts.losses], facts.deaths[0]["what"]) == ([2.0], "worker 1 (worker): died")

    floor = tiling_record(0, [1, 1, 1], why="")["tiling"]
    change = {"at_s": 3.0, "reason": "p1 died", "step": 7, "settled": "finished", "members": ["p0", "p2"], "lost_s": 0.5}
    report = {"changes": [{**change, "moved_units": 4, "tiling": floor}], "first_tiling": floor}
    elastic = tmp_path / "elastic.json"
    elastic.write_text(json.dumps(report, indent=2), encoding="utf-8")
    facts = facts_of(read_run(elastic))
    assert [(step["iteration"], step["why"]) for step in facts.steps] == [(0, "at the start"), (7, "p1 died")]
    assert facts.deaths[0]["repair"] == "the open step was finished; 2 ranks go on; 4 units moved"


def test_the_log_of_an_elastic_run_and_its_repairs_make_one_page(tmp_path: Path) -> None:
    floor = tiling_record(0, [1, 1, 1], why="")["tiling"]
    change = {"at_s": 3.0, "reason": "p1 died", "step": 25, "settled": "finished", "members": ["p0", "p2"], "lost_s": 0.5}
    repairs = tmp_path / "repairs.json"
    repairs.write_text(json.dumps({"changes": [{**change, "moved_units": 4, "tiling": floor}], "first_tiling": floor}))
    log = [record for record in a_run() if record["event"] != "members"]
    run = joined([recorded(log), read_run(repairs)])
    assert joined([read_run(repairs), recorded(log)]) == run
    facts = facts_of(run)
    assert [step["iteration"] for step in facts.steps] == [0, 40, 80, 120]  # as the log has them
    assert [row["when"] for row in facts.deaths] == ["3.0 s, iteration 25"]
    iterations = [record["iteration"] for record in run.records if "iteration" in record]
    assert iterations == sorted(iterations)
    assert run.records[0]["event"] == "settings"
    assert len(facts_of(joined([read_run(repairs)])).steps) == 2
    with pytest.raises(InputError, match="these are logs of two runs, and a page is of one"):
        joined([recorded(log), recorded(a_run())])
    other = [{**record, "tiling": {**record["tiling"], "samples": 7}} for record in log if record["event"] == "tiling"]
    with pytest.raises(InputError, match=r"these are of different runs, with tilings of \d+ samples by .* and 7 samples by"):
        joined([recorded(log), recorded(other)])


def test_a_second_fit_with_the_same_tiling_changes_nothing() -> None:
    floors = [
        tiling_record(iteration, [1, 1, part], why="at the start") for iteration, part in ((0, 1), (8, 1), (16, 2), (24, 1))
    ]
    run = recorded([each for each in a_run() if each["event"] == "settings"] + floors)
    assert [step["iteration"] for step in facts_of(run).steps] == [0, 16, 24]
    assert "<dt>tiling changes</dt><dd>twice</dd>" in page_of(run, title="two calls")


@pytest.mark.parametrize("loss", [math.nan, None])
def test_a_last_loss_that_is_not_a_number_is_shown(loss: float | None) -> None:
    values = [{"event": "train", "iteration": number, "loss": each} for number, each in enumerate((2.0, 1.0, loss))]
    assert "<dt>loss</dt><dd>2 to nan</dd>" in page_of(recorded(values), title="nan")


def test_a_colour_means_one_thing_and_captions_say_what_is_there() -> None:
    words, colours = (set(each) for each in zip(*PHASES_SHOWN.values(), strict=True))
    assert not set(RANKS) & colours
    assert len(words) == len(colours) == len(PHASES_SHOWN)
    text = page_of(recorded(a_run()), title="run")
    assert "Dotted vertical lines: the tiling changed." in text
    assert "Triangles: alarms." not in text
    assert "tensor-parallel sums" in text
    assert "Dotted vertical" not in page_of(recorded(a_run()[:4]), title="one tiling")
    text = page_of(read_run(RESULTS / "staged-run.jsonl"), title="stages")
    for said in ("Timeline of one iteration", "The samples and stages of each rank.", "Hand-over: ", "gets 48 KiB back."):
        assert said in text
    text = page_of(read_run(RESULTS / "report.jsonl"), title="no stages")
    for said in ("Timeline of one iteration", "Hand-over: ", '"hand-over"', '"bubble"'):
        assert said not in text


def test_the_legend_names_what_is_drawn() -> None:
    def colour(records: list[dict[str, Any]]) -> Any:
        return charts_of(facts_of(recorded(records)))["loss"]["layer"][0]["encoding"]["strokeDash"]

    assert colour(a_run())["legend"] is None
    validated = colour([*a_run(), {"event": "validation", "iteration": 150, "epoch": 1, "loss": 0.1}])
    assert (validated["scale"]["domain"], validated["legend"]) == (["training", "validation"], {"orient": "bottom"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty: nothing was recorded"),
        ('{"event": "settings"}\nno\n', "line 2 of .* is not JSON: 'no'"),
        ("[1]\n", "line 1 of .* is not a record"),
        ('{"iteration": 3}\n', "line 1 of .* is not a record"),
    ],
)
def test_what_is_not_a_log_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=said):
        read_run(path)


def test_the_command_writes_the_page_and_replaces_nothing_unasked(tmp_path: Path) -> None:
    log, page = tmp_path / "run.jsonl", tmp_path / "run.html"
    log.write_text("".join(json.dumps(line) + "\n" for line in a_run()), encoding="utf-8")
    run = partial(CliRunner().invoke, app)
    assert run(["report", str(log), "-o", str(page)]).exit_code == 0
    assert "<h1>Run run</h1>" in page.read_text(encoding="utf-8")
    assert run(["report", str(log), "-o", str(page)]).exit_code != 0
    assert run(["report", str(log), "-o", str(page), "--force"]).exit_code == 0
    with pytest.raises(InputError, match=r"a report is written as \.html, not as '\.png'"):
        write_page(recorded(a_run()), tmp_path / "run.png", title="no")


def test_without_vega_the_pip_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tatami-torch\[report\]'"):
        write_page(recorded(a_run()), tmp_path / "run.html", title="none")


@pytest.mark.ranks(1, 2, 4)
def test_the_trainer_writes_its_page(comm: AbstractCommunicator, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    model = tiled(network(), comm, layout=some_layouts(comm.size)[-1], batch_size=16)
    records = Records()
    trainer = Trainer(
        model, optimizer=SGD, loss=nn.MSELoss(), retile=Retiler(every=4), records=records, record_every=3, report=path
    )
    data = torch.ones(16, 4), torch.zeros(16, 2)
    history = trainer.fit(data, batch_size=16, iterations=8)
    if comm.rank == 0:
        facts = facts_of(RecordedRun(records=tuple(records.kept or ())))
        assert facts.ranks == list(model.names)
        assert len(facts.steps) == 1 + sum(check.moved is not None for check in history.checks)
        assert [row["loss"] for row in facts.losses] == pytest.approx([history.losses[2], history.losses[5]])
        assert facts.num_checks == len(history.checks)
        assert {row["rank"] for row in facts.phases} == set(model.names)
        assert all(row["ms"] >= 0 for row in facts.phases)
        for phase in ("forward", "backward", "update"):
            assert sum(row["ms"] for row in facts.phases if row["phase"] == phase) > 0
        assert 'type="range"' in path.read_text(encoding="utf-8")
    comm.bcast_object(None)
    trainer.fit(data, batch_size=16, iterations=1)  # writes its own page again
    with pytest.raises(OutputExistsError, match=r"run\.html exists already"):
        Trainer(model, optimizer=SGD, loss=nn.MSELoss(), report=path).fit(data, batch_size=16, iterations=1)


def test_where_ranks_come_and_go_each_tiling_has_its_own_phases() -> None:
    """Rank 0 of an elastic run; the other one joins in the second iteration, and was there for one of two of the new tiling."""
    workload = Workload.mlp(20, 12, 10, samples=60)
    model: Any = SimpleNamespace(workload=workload, phases=SimpleNamespace(), stage=None)
    model.comm = SimpleNamespace(rank=0, bcast_object=lambda value, **_: value)
    model.comm.gather_object = lambda own: [own, (1, {"forward_s": 5.0})]

    def lie(*names: str) -> None:
        model.names = names
        model.cluster = Cluster(processors=tuple(Processor(name=name, speed=1.0, host="h") for name in names))
        planned = plan("srpm", cluster=model.cluster, workload=workload)
        model.layout, model.tiling = planned.layout, planned.tiling
        model.traffic = traffic_of([planned.tiling], workload=workload, names=names, hosts=dict.fromkeys(names, "h"))

    def iterate(iteration: int, seconds: float) -> None:
        model.phases.last = PhaseTimes(**{f"{phase}_s": seconds for phase in PHASES})
        recorder.iterated(None, iteration=iteration, epoch=0, loss=1.0, num_samples=10 * iteration, seconds=seconds)

    records = Records()
    records.kept = []
    lie("p0", "p1")
    recorder = RunRecorder(model, records, every=4, whole=lambda body: body())
    recorder.begin(iteration=0)
    iterate(1, 1.0)
    lie("p0", "p2")
    for iteration, seconds in ((2, 100.0), (3, 3.0), (4, 3.0), (5, 2.0), (6, 2.0), (7, 2.0), (8, 4.0)):
        iterate(iteration, seconds)
    run = recorded(records.kept)
    assert [(each["iteration"], each["why"]) for each in run.of("tiling")] == [(0, "at the start"), (2, "p1 gone; p2 joined")]
    assert [each["samples_per_s"] for each in run.of("train")] == pytest.approx([100 / 107, 260 / 10])
    phases, _ = run.of("phases")
    assert phases["iterations"] == 2
    assert phases["ranks"] == {"p0": {f"{phase}_s": 6.0 for phase in PHASES}, "p2": {"forward_s": 10.0}}


@pytest.mark.ranks(2)
def test_a_run_that_fails_leaves_its_page(comm: AbstractCommunicator, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    model = tiled(network(), comm, layout=some_layouts(comm.size)[-1], batch_size=16)
    make = partial(Trainer, model, optimizer=SGD, loss=nn.MSELoss(), rescue_dir=path.parent)
    data = torch.full((16, 4), float("nan")), torch.zeros(16, 2)
    with pytest.raises(TatamiError):
        make(report=path).fit(data, batch_size=16, iterations=2)
    if comm.rank == 0:
        assert "NotFiniteError" in path.read_text(encoding="utf-8")
