"""Runs that lose ranks end with the parameters and the losses of the undisturbed one."""

import contextlib
import dataclasses
import functools
import io
import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("ray", reason="Ray is not installed")

import elastic_scripts as scripts
from elastic_scripts import Killer, KillerOfAll

from tatami.cli.app import app
from tatami.elastic import ElasticResult, launch, run_elastic
from tatami.elastic.settings import ElasticContext, ElasticControl, ElasticSettings, Moment
from tatami.engine.crew import Member, Pool, _kill
from tatami.engine.processes import Identity
from tatami.engine.ray_engine import engine
from tatami.errors import TrainingError

pytestmark = pytest.mark.timeout(600)


patient = functools.partial(ElasticSettings, heartbeat_s=60.0, patience_s=200.0, timeout_s=200.0)
"""However busy the machine is."""
THREE = patient(ranks=3)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Of processes that are there already, for they take seconds to start."""
    with engine():
        pool = Pool()
        yield pool
        pool.close()


@functools.cache
def undisturbed(kind: str, count: int = scripts.STEPS) -> tuple[list[float], dict[str, torch.Tensor]]:
    return scripts.plain(kind, count)


def run(pool: Pool, replicas: int, *faults: tuple[str, Moment, int], kind: str = "sgd", copies: int = 2) -> ElasticResult:
    return run_elastic(
        functools.partial(scripts.train, replicas, kind, scripts.STEPS),
        settings=patient(ranks=3, copies=copies),
        context=ElasticContext(hook=Killer(*faults), pool=pool, on_line=lambda name, text: print(f"{name}: {text}")),
    )


def check(result: ElasticResult, plain: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    """Every parameter and every loss is that of one machine."""
    losses, state = plain
    (whole,) = [values for _, values in result.values.values() if values]
    assert set(whole) == set(state)
    for name, tensor in state.items():
        torch.testing.assert_close(whole[name], tensor, rtol=1e-10, atol=1e-10, msg=f"{name} differs")
    for told, _ in result.values.values():
        torch.testing.assert_close(torch.tensor(told), torch.tensor(losses)[-len(told) :], rtol=1e-10, atol=1e-10)


MOMENTS = [moment for moment in Moment if moment not in (Moment.FORMING, Moment.TAKING, Moment.LAYING, Moment.LAID)]
IN_REPAIR = [Moment.FORMING, Moment.TAKING, Moment.LAYING, Moment.LAID]
ALL = os.environ.get("TATAMI_ELASTIC_CHAOS") == "1"
CHAOS_RUNS = int(os.environ.get("TATAMI_ELASTIC_CHAOS_RUNS", "2"))
CHAOS_SEED = int(os.environ.get("TATAMI_CHAOS_SEED", "0"))
FEW = [(1, Moment.TENSOR_PARALLEL), (2, Moment.BACKWARD), (3, Moment.BEFORE_UPDATE)]


@pytest.mark.parametrize(("replicas", "moment"), [(c, m) for c in (1, 2, 3) for m in MOMENTS] if ALL else FEW)
def test_a_killed_rank_costs_nothing_but_time(pool: Pool, replicas: int, moment: Moment) -> None:
    kind = "adam" if replicas == 1 else "sgd"
    if replicas == 3 and moment is Moment.TENSOR_PARALLEL:
        pytest.skip("replicas of one rank have no tensor-parallel sums")
    if replicas == 1 and moment is Moment.GRADIENTS:
        pytest.skip("one replica has no gradient sums")
    result = run(pool, replicas, ("p1", moment, 3 if moment is Moment.AFTER_UPDATE else 2), kind=kind)
    assert set(result.values) == {"p0", "p2"}
    check(result, undisturbed(kind))
    (change,) = result.report.changes
    assert change.members == ("p0", "p2")
    assert "p1" in change.reason
    assert change.step in (2, 3)


def test_a_mirror_puts_back_the_statistics_that_a_step_in_vain_has_changed(pool: Pool) -> None:
    result = run(pool, 1, ("p1", Moment.BEFORE_POINT, 2), kind="normalizing")
    check(result, undisturbed("normalizing"))
    assert result.report.changes[0].settled == "redone"


STAGED_MOMENTS = [moment for moment in MOMENTS if moment is not Moment.TENSOR_PARALLEL]
FEW_STAGED = [(None, Moment.BACKWARD), (2, Moment.HANDOVER), (3, Moment.BEFORE_UPDATE)]


@functools.cache
def undisturbed_stages() -> tuple[list[float], dict[str, torch.Tensor]]:
    return scripts.train_in_stages(1)


@pytest.mark.parametrize(("stages", "moment"), [(s, m) for s in (None, 2, 3) for m in STAGED_MOMENTS] if ALL else FEW_STAGED)
def test_a_killed_stage_costs_nothing_but_time(pool: Pool, stages: int | None, moment: Moment) -> None:
    """Its weights come from another replica (two of two stages), or from a mirror (one replica of two or three)."""
    if stages is not None and moment is Moment.GRADIENTS:
        pytest.skip("one replica sums no gradients")
    ranks = 4 if stages is None else 3
    said: list[str] = []
    context = ElasticContext(
        hook=Killer(("p1", moment, 3 if moment is Moment.AFTER_UPDATE else 2)),
        pool=pool,
        on_line=lambda _, text: said.append(text),
    )
    result = run_elastic(functools.partial(scripts.train_in_stages, stages), settings=patient(ranks=ranks), context=context)
    assert set(result.values) == {f"p{rank}" for rank in range(ranks)} - {"p1"}
    check(result, undisturbed_stages())
    (change,) = result.report.changes
    assert "p1" in change.reason
    after = {None: 1, 2: 2, 3: 1}[stages]  # with speeds that are not known the planner takes stages where it has to
    assert f"step {scripts.STEPS - 1} in {after} stages" in said
    assert len(change.stages) == (after if after > 1 else 0)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_is_computed_in_vain_ends_at_the_next_layer(pool: Pool, where: str) -> None:
    """In the third step the rank dies; the others compute on until they hear of it, and then no layer more of that step."""
    moment = Moment.BEFORE_FORWARD if where == "forward" else Moment.BACKWARD
    context = ElasticContext(hook=Killer(("p1", moment, 2)), pool=pool)
    result = run_elastic(functools.partial(scripts.train_and_count, where), settings=THREE, context=context)
    disturbed, steps = scripts.STEPS + 1, scripts.STEPS
    expected = [(disturbed, steps), (steps, steps)] if where == "forward" else [(disturbed, steps), (disturbed, disturbed)]
    assert result.values == dict.fromkeys(("p0", "p2"), expected)


@pytest.mark.parametrize("moment", IN_REPAIR if ALL else [Moment.LAYING])
def test_a_rank_that_dies_while_the_death_of_another_is_repaired(pool: Pool, moment: Moment) -> None:
    """Two deaths of three leave one rank: with two holders of each unit and one death after the other, all is still there."""
    result = run(pool, 3, ("p1", Moment.BACKWARD, 2), ("p0", moment, 2))
    assert set(result.values) == {"p2"}
    check(result, undisturbed("sgd"))
    changes = result.report.changes
    # One that dies when it is done with the first repair may be missed before or after the other one has told that it is done.
    assert len(changes) in ((1, 2) if moment is Moment.LAID else (1,))
    assert ", ".join(change.reason for change in changes) == "p1 died, p0 died"


@pytest.mark.parametrize("moment", IN_REPAIR if ALL else [Moment.TAKING])
def test_a_stage_that_dies_while_the_death_of_another_is_repaired(pool: Pool, moment: Moment) -> None:
    """The first of two replicas is gone; the second has all that is needed."""
    context = ElasticContext(hook=Killer(("p1", Moment.HANDOVER, 2), ("p0", moment, 2)), pool=pool)
    result = run_elastic(functools.partial(scripts.train_in_stages, None), settings=patient(ranks=4), context=context)
    assert set(result.values) == {"p2", "p3"}
    check(result, undisturbed_stages())


def test_a_rank_joins_a_run_in_stages(pool: Pool) -> None:
    """Two ranks with a stage each; the third gets one, or shares one, and the numbers stay the same."""
    controls: list[ElasticControl] = []

    def listen(_name: str, text: str) -> None:
        if text == "step 1 in 2 stages":
            controls[0].add()

    context = ElasticContext(on_start=controls.append, pool=pool, on_line=listen)
    result = run_elastic(functools.partial(scripts.train_in_stages, 2, 3), settings=patient(ranks=2), context=context)
    assert [change.members for change in result.report.changes] == [("p0", "p1", "p2")]
    count = len(result.values["p0"][0])
    assert len(result.values["p2"][0]) == 2
    check(result, scripts.train_in_stages(1, count=count))


@pytest.mark.parametrize("number", range(CHAOS_RUNS))
def test_whatever_happens_a_run_ends_with_the_same_numbers_or_a_named_stop(pool: Pool, number: int) -> None:
    """Deaths at any moments, of repairs too; ranks that join and leave meanwhile. `make chaos` has 200 of them."""
    drawn = random.Random(f"{CHAOS_SEED}/{number}")
    ranks, replicas, kind = drawn.randint(2, 4), drawn.randint(0, 3), drawn.choice(["sgd", "adam"])
    names = [f"p{rank}" for rank in range(ranks)]
    deaths = drawn.sample(names, drawn.randint(1, min(2, ranks - 1)))
    faults = [(name, drawn.choice(list(Moment)), drawn.randrange(2 * scripts.STEPS)) for name in deaths]
    leaver = (drawn.choice(names), drawn.randrange(4 * scripts.STEPS))
    joins = {f"step {drawn.randrange(2 * scripts.STEPS)}" for _ in range(drawn.randint(0, 2))}
    told = f"{ranks} ranks, {replicas} replicas, {kind}, {faults}, leaving {leaver}, joining at {joins}"
    print(told)
    controls: list[ElasticControl] = []

    def listen(_name: str, text: str) -> None:
        if text in joins:
            joins.discard(text)
            controls[0].add()

    context = ElasticContext(hook=Killer(*faults), pool=pool, on_line=listen, on_start=controls.append)
    script = functools.partial(scripts.train_in_disorder, replicas, kind, leaver)
    stopped: TrainingError | None = None
    try:
        result = run_elastic(script, settings=patient(ranks=ranks), context=context)
    except TrainingError as error:
        stopped = error
    if stopped is None:
        check(result, undisturbed(kind, 2 * scripts.STEPS))
    else:  # two may have held the only copies, or all that there were
        assert len(deaths) + (leaver[1] < 2 * scripts.STEPS) > 1
        assert "(units lost)" in str(stopped) or "(no members)" in str(stopped)


@functools.cache
def undisturbed_fit(data: str, count: int) -> tuple[Any, ...]:
    return scripts.fit(1, data, None, count)


@pytest.mark.parametrize(
    ("replicas", "data", "fault"),
    [
        (1, "loader", ("p1", Moment.BACKWARD, 3)),
        (2, "tensors", ("p1", Moment.BEFORE_UPDATE, 3)),
        (0, "tensors", ("p1", Moment.HANDOVER, 3)),
        (2, "tensors", ("p0", Moment.BEFORE_POINT, 2)),  # in what is recorded after the update before
    ],
)
def test_the_trainer_goes_on_where_a_rank_is_killed(
    pool: Pool, tmp_path: Path, replicas: int, data: str, fault: tuple[str, Moment, int]
) -> None:
    """Also from a mirror; past the point the update is finished where any that is left has passed it, too."""
    (name, moment, _), log = fault, tmp_path / "run.jsonl"
    context = ElasticContext(hook=Killer(fault), pool=pool)
    result = run_elastic(functools.partial(scripts.fit, replicas, data, log=str(log)), settings=THREE, context=context)
    assert set(result.values) == {"p0", "p1", "p2"} - {name}
    (change,) = result.report.changes
    assert change.settled in ({"redone"} if moment is Moment.BACKWARD else {"redone", "finished"})
    for told in result.values.values():
        check_fit(told, undisturbed_fit(data, scripts.STEPS))
    torch.testing.assert_close(losses_in(log), undisturbed_fit(data, scripts.STEPS)[0], rtol=1e-10, atol=1e-10)


def check_fit(told: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    """Losses and validations from where the rank has been there, and what the network then is."""
    losses, validation, outputs, rate = told
    torch.testing.assert_close(losses, expected[0][-len(losses) :], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(validation, expected[1][len(expected[1]) - len(validation) :], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(outputs, expected[2], rtol=1e-10, atol=1e-10)
    assert rate == expected[3]


def test_targets_that_do_not_count_weigh_in_mirrors_as_in_what_they_mirror(pool: Pool) -> None:
    context = ElasticContext(hook=Killer(("p1", Moment.BACKWARD, 4)), pool=pool)
    result = run_elastic(functools.partial(scripts.fit_leaving_out, 1), settings=THREE, context=context)
    losses, outputs = scripts.fit_leaving_out(1)
    assert set(result.values) == {"p0", "p2"}
    for told, predicted in result.values.values():
        torch.testing.assert_close(told, losses, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(predicted, outputs, rtol=1e-10, atol=1e-10)


def losses_in(log: Path) -> list[float]:
    """The losses that were recorded, one for each iteration from the first on."""
    records = [record for record in map(json.loads, log.read_text().splitlines()) if record["event"] == "train"]
    assert [record["iteration"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


@pytest.mark.parametrize("data", ["tensors", "loader"])
def test_a_rank_that_joins_a_trainer_goes_on_with_the_same_numbers(pool: Pool, tmp_path: Path, data: str) -> None:
    controls: list[ElasticControl] = []

    def listen(_name: str, text: str) -> None:
        if text == "two updates":
            controls[0].add()

    context = ElasticContext(on_start=controls.append, pool=pool, on_line=listen)
    script = functools.partial(scripts.fit_until_joined, str(tmp_path / "run.jsonl"), data)
    result = run_elastic(script, settings=patient(ranks=2), context=context)
    assert [change.members for change in result.report.changes] == [("p0", "p1", "p2")]
    count = result.values["p0"][0]
    assert {name: told[0] for name, told in result.values.items()} == dict.fromkeys(("p0", "p1", "p2"), count)
    assert result.values["p2"][-1] in (3, 4)  # the wish to stop goes with the next update, or with the end of the epoch
    losses, validation, *rest = undisturbed_fit(data, count)
    validated = result.values["p0"][2]  # at the end of an epoch, callbacks stop a run after its validation, iterations before
    torch.testing.assert_close(validated[: len(validation)], validation, rtol=1e-10, atol=1e-10)
    for told in result.values.values():
        check_fit(told[1:-1], (losses, validated, *rest))
    torch.testing.assert_close(losses_in(tmp_path / "run.jsonl"), losses, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("replicas", [1, 0], ids=["one replica", "two stages"])
def test_deaths_of_all_copies_cost_the_steps_since_the_last_checkpoint(pool: Pool, tmp_path: Path, replicas: int) -> None:
    faults = KillerOfAll(("p0", "p1"), Moment.BEFORE_FORWARD, 5, folder=str(tmp_path))
    log = tmp_path / "run.jsonl"
    script = functools.partial(scripts.fit, replicas, "tensors", str(tmp_path / "checkpoints"), log=str(log))
    result = run_elastic(script, settings=THREE, context=ElasticContext(hook=faults, pool=pool))
    assert set(result.values) == {"p2"}
    check_fit(result.values["p2"], undisturbed_fit("tensors", scripts.STEPS))
    torch.testing.assert_close(losses_in(log), undisturbed_fit("tensors", scripts.STEPS)[0], rtol=1e-10, atol=1e-10)
    change = result.report.changes[-1]
    assert (change.settled, change.members) == ("returned", ("p2",))
    assert change.steps_lost == 5 - change.step > 0
    assert f"comes next and {change.steps_lost} step" in str(change)


SHARDED_MOMENTS = [moment for moment in MOMENTS if moment is not Moment.TENSOR_PARALLEL]


@pytest.mark.parametrize("replicas", [3, 0], ids=["replicas", "two stages"])
@pytest.mark.parametrize("moment", SHARDED_MOMENTS if ALL else [Moment.BACKWARD, Moment.BEFORE_UPDATE])
def test_a_death_with_a_sharded_optimizer_costs_the_steps_since_the_last_checkpoint(
    pool: Pool, tmp_path: Path, replicas: int, moment: Moment
) -> None:
    """Also in the middle of an update, which the others have made in part then."""
    folder, log = str(tmp_path / "checkpoints"), tmp_path / "run.jsonl"
    script = functools.partial(scripts.fit, replicas, "tensors", folder, shards=True, log=str(log))
    context = ElasticContext(hook=Killer(("p1", moment, 3)), pool=pool)
    result = run_elastic(script, settings=THREE, context=context)
    assert set(result.values) == {"p0", "p2"}
    change = result.report.changes[-1]
    assert (change.settled, change.members) == ("returned", ("p0", "p2"))
    assert change.reason.endswith("the run goes on from its last checkpoint")
    for told in result.values.values():
        check_fit(told, undisturbed_fit("tensors", scripts.STEPS))
    torch.testing.assert_close(losses_in(log), undisturbed_fit("tensors", scripts.STEPS)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("moment", [Moment.BEFORE_FORWARD, Moment.BEFORE_UPDATE])
def test_without_a_checkpoint_a_run_with_a_sharded_optimizer_begins_again(pool: Pool, tmp_path: Path, moment: Moment) -> None:
    log = tmp_path / "run.jsonl"
    context = ElasticContext(hook=Killer(("p0", moment, 2)), pool=pool)
    script = functools.partial(scripts.fit, 3, "tensors", shards=True, log=str(log))
    result = run_elastic(script, settings=THREE, context=context)
    assert (result.report.changes[-1].settled, result.report.changes[-1].steps_lost) == ("returned", 2)
    for told in result.values.values():
        check_fit(told, undisturbed_fit("tensors", scripts.STEPS))
    torch.testing.assert_close(losses_in(log), undisturbed_fit("tensors", scripts.STEPS)[0], rtol=1e-10, atol=1e-10)


def test_two_that_die_at_once_leave_the_third_where_it_holds_all(pool: Pool, tmp_path: Path) -> None:
    faults = KillerOfAll(("p0", "p1"), Moment.BEFORE_FORWARD, 3, folder=str(tmp_path))
    script = functools.partial(scripts.train, 3, "sgd", scripts.STEPS)
    result = run_elastic(script, settings=THREE, context=ElasticContext(hook=faults, pool=pool))
    assert set(result.values) == {"p2"}
    check(result, undisturbed("sgd"))


def test_a_rank_that_is_stopped_is_noticed_by_its_silence(pool: Pool) -> None:
    result = run_elastic(
        functools.partial(scripts.train, 2, "sgd", scripts.STEPS),
        # The others must not be silent for so long, however busy the machine is.
        settings=dataclasses.replace(THREE, heartbeat_s=15.0),
        context=ElasticContext(hook=Killer(("p1", Moment.FORWARD, 3), how=signal.SIGSTOP), pool=pool),
    )
    assert set(result.values) == {"p0", "p2"}
    check(result, undisturbed("sgd"))
    assert "p1 gave no sign of life" in result.report.changes[0].reason


def test_a_rank_whose_script_fails_before_it_is_let_in_is_turned_away(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `tatami run --elastic`: the others go on, what happened is told, and the timeline is drawn."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    told = tmp_path / "told"
    script = tmp_path / "train.py"
    script.write_text(scripts.TURNS_JOINERS_AWAY)
    controls: list[ElasticControl] = []

    class Telling(io.StringIO):
        """Lets the ranks end when it is told that one does not join."""

        def write(self, text: str) -> int:
            if "p2 does not join the run" in text:
                told.touch()
            return super().write(text)

    def run_here(function: Any, *, settings: ElasticSettings, context: ElasticContext) -> ElasticResult:
        on_line = context.on_line
        assert on_line is not None

        def listen(name: str, text: str) -> None:
            on_line(name, text)
            if text == "the first step is done":
                controls[0].add()

        here = dataclasses.replace(context, on_line=listen, on_start=controls.append, pool=pool)
        with contextlib.redirect_stderr(Telling()) as said:
            result = run_elastic(function, settings=patient(ranks=settings.ranks), context=here)
        assert "as its script failed" in said.getvalue()
        assert "ValueError: there is no data on this machine" in said.getvalue()
        return result

    monkeypatch.setattr(launch, "run_elastic", run_here)
    report, picture = tmp_path / "run.json", tmp_path / "run.png"
    command = ["run", "--elastic", "-n", "2", "--json", "--report", str(report), "--plot", str(picture), str(script), str(told)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    *lines, record = done.stdout.splitlines()
    assert sorted(line for line in lines if line.startswith("p")) == [
        "p0: the end",
        "p0: the first step is done",
        "p1: the end",
    ]
    assert (json.loads(record)["exit_code"], json.loads(record)["changes"]) == (0, [])
    assert json.loads(report.read_text())["changes"] == []
    told_of = {"p2": "its script failed: ValueError: there is no data on this machine"}
    assert json.loads(report.read_text())["not_joined"] == json.loads(record)["not_joined"] == told_of
    assert json.loads(report.read_text())["first_members"] == ["p0", "p1"]
    assert json.loads(report.read_text())["settings"]["ranks"] == 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_all_copies_lost_is_an_error_that_names_them(pool: Pool) -> None:
    with pytest.raises(TrainingError, match=r"units 6 to 11 of block 0, held by p1.*copies=2 survives"):
        run(pool, 1, ("p1", Moment.BACKWARD, 2), copies=1)


def test_ranks_join_and_leave_between_two_steps(pool: Pool) -> None:
    """One joins, one is removed, one asks to leave: nothing is done again, and no sample is lost."""
    controls: list[ElasticControl] = []
    said: list[str] = []

    def listen(_name: str, text: str) -> None:
        said.append(text)
        if text == "there are 2 ranks" and said.count(text) == 1:
            controls[0].add()
        if text == "there are 3 ranks" and said.count(text) == 1:
            controls[0].remove("p0")

    context = ElasticContext(on_start=controls.append, pool=pool, on_line=listen)
    result = run_elastic(scripts.train_until_alone, settings=patient(ranks=2), context=context)
    assert [change.members for change in result.report.changes] == [("p0", "p1", "p2"), ("p1", "p2"), ("p1",)]
    assert {change.settled for change in result.report.changes} == {"none"}
    assert set(result.values) == {"p1"}
    count, whole = result.values["p1"]
    for name, tensor in undisturbed("sgd", count)[1].items():
        torch.testing.assert_close(whole[name], tensor, rtol=1e-9, atol=1e-9, msg=f"{name} differs")


def test_a_process_on_another_machine_is_ended_by_way_of_its_node(pool: Pool) -> None:
    del pool  # Ray runs as long as it does
    import ray

    with subprocess.Popen(["sleep", "600"]) as process:
        there = Identity(pid=process.pid, node=ray.get_runtime_context().get_node_id(), machine="another")
        _kill(Member(actor=None, seen_s=0.0, heard_s=0.0, identity=there))
        assert process.wait(timeout=200) == -signal.SIGKILL


def test_one_that_is_slow_for_a_while_waits_without_a_tile_and_comes_back_by_itself(pool: Pool) -> None:
    settings = patient(ranks=3, retile=True)
    result = run_elastic(scripts.train_while_one_is_slow_for_a_while, settings=settings, context=ElasticContext(pool=pool))
    reasons = [change.reason for change in result.report.changes]
    assert [reason.partition(", ")[2] for reason in reasons if "p2" in reason] == [
        "p2 waits without a tile",
        "p2 has a tile again",
    ]
    assert {change.members for change in result.report.changes} == {("p0", "p1", "p2")}
    assert {change.settled for change in result.report.changes} == {"none"}
    count, whole = result.values["p0"]
    assert 240 < count < 4000
    for name, tensor in undisturbed("sgd", count)[1].items():
        torch.testing.assert_close(whole[name], tensor, rtol=1e-9, atol=1e-9, msg=f"{name} differs")


def test_stages_follow_the_ranks(pool: Pool) -> None:
    script = functools.partial(scripts.train_in_stages, 2, slow=True)
    result = run_elastic(script, settings=patient(ranks=2, retile=True), context=ElasticContext(pool=pool))
    (change,) = result.report.changes
    assert (change.members, len(change.stages), change.settled) == (("p0", "p1"), 2, "none")
    assert change.reason == "other stages"
    check(result, scripts.train_in_stages(1, count=len(result.values["p0"][0])))


def test_stages_with_a_sharded_optimizer_stay(pool: Pool) -> None:
    script = functools.partial(scripts.train_in_stages, 2, count=100, slow=True, shards=True)
    result = run_elastic(script, settings=patient(ranks=2, retile=True), context=ElasticContext(pool=pool))
    assert result.report.changes == ()
    check(result, scripts.train_in_stages(1, count=100))


def test_tiles_follow_the_ranks_and_one_that_is_too_slow_leaves(pool: Pool) -> None:
    settings = patient(ranks=3, retile=True)
    result = run_elastic(scripts.train_while_others_slow_down, settings=settings, context=ElasticContext(pool=pool))
    *retiled, left = result.report.changes
    assert left.reason == "p2 leaves, too slow to be worth its messages"
    assert left.members == ("p0", "p1")
    assert any(40 < change.step <= 90 for change in retiled)
    assert {change.members for change in retiled} == {("p0", "p1", "p2")}
    assert {change.settled for change in result.report.changes} == {"none"}
    assert set(result.values) == {"p0", "p1"}
    count, whole = result.values["p0"]
    assert 90 < count < 2000
    for name, tensor in undisturbed("sgd", count)[1].items():
        torch.testing.assert_close(whole[name], tensor, rtol=1e-9, atol=1e-9, msg=f"{name} differs")
