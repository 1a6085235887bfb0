"""Random blows on real processes, servers and nodes: every round is applied once, and not a bit is different.

`make chaos` asks for 200 runs (TATAMI_CHAOS_RUNS), and `make chaos CHAOS_SEED=...` for others than the first.
"""

import json
import logging
import os
import random
import secrets
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ray")

import ray
import ray.cluster_utils
from storm_rig import Blow, Storm, Target, draw_blows
from train_rig import loss_fn, model_fn, train_with

from tatami.engine.crew import Crew, Pool
from tatami.engine.ray_engine import require_ray, run_folder
from tatami.engine.ray_start import CONFIG, LOOPBACK, conditions, read_token, shut_down
from tatami.records import Records
from tatami.report.server_run import RunReport
from tatami.server import SGD, RunControl
from tatami.server.recovery import AbstractRecovery, Checkpoint, FromServers, Ignore
from tatami.testing.faulty import Death

RUNS = int(os.environ.get("TATAMI_CHAOS_RUNS", "10"))
FIRST_SEED = int(os.environ.get("TATAMI_CHAOS_SEED", "0"))
# On a busy machine sound processes may be silent for long, and two servers that are taken for dead at once are too many.
HEARTBEAT_S = float(os.environ.get("TATAMI_CHAOS_HEARTBEAT_S", "12"))
ROUNDS = 12
BATCH = 30
X = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
Y = torch.sin(X[:, :2])
pytestmark = pytest.mark.timeout(900 + 60 * RUNS)


class Nodes:
    """Three of Ray's nodes on this machine: the head, and two that may be killed."""

    def __init__(self, folder: Path) -> None:
        self._arguments: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "node_ip_address": LOOPBACK}
        self._folder, self._token = folder, secrets.token_hex(32)
        head = self._arguments | {"include_dashboard": False, "_system_config": dict(CONFIG)}
        with self._started():
            read_token(ray)
            make: Any = ray.cluster_utils.Cluster
            self.cluster: Any = make(initialize_head=True, head_node_args=head)
            self.head = self.cluster.head_node.node_id
            ray.init(address=self.cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        self.complete()

    def _started(self) -> AbstractContextManager[None]:
        """As a run starts Ray: with patience, too."""
        return conditions(require_ray(), folder=self._folder, token=self._token)

    def complete(self) -> None:
        """Start nodes in place of those that are gone; each is up when this returns."""
        with self._started():
            while len(self.cluster.list_all_nodes()) < 3:
                self.cluster.add_node(wait=False, **self._arguments)

    def await_all(self) -> None:
        """Return when Ray knows all three; ends by the test's own timeout where it never does."""
        wanted = {each.node_id for each in self.cluster.list_all_nodes()}
        list_nodes: Any = ray.nodes
        while not wanted <= {each["NodeID"] for each in list_nodes() if each["Alive"]}:
            time.sleep(0.1)

    def kill(self, node: str) -> None:
        for each in self.cluster.list_all_nodes():
            if each.node_id == node:
                self.cluster.remove_node(each, allow_graceful=False)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with run_folder() as folder, pytest.MonkeyPatch.context() as patch:
        (folder / "ray").mkdir()
        patch.setenv("RAY_TMPDIR", str(folder))
        found = Nodes(folder)
        yield found
        ray.shutdown()
        found.cluster.shutdown()
        shut_down(ray, folder=folder)


@pytest.fixture(scope="module")
def pool(nodes: Nodes) -> Pool:  # noqa: ARG001 - runs on them
    return Pool()


def run(pool: Pool, tmp_path: Path, **changes: Any) -> tuple[torch.Tensor, RunReport, list[dict[str, Any]]]:
    """The parameters, the report, and what was told of each round."""
    settings: dict[str, Any] = {
        "dataset": (X, Y),
        "rounds": ROUNDS,
        "workers": 3,
        "servers": 3,
        "replicas": 2,
        "batch_size": BATCH,
        "optimizer": SGD(lr=0.2, momentum=0.9),
        "clip_norm": 0.5,
        "heartbeat_s": HEARTBEAT_S,
        "restarts": 1000,
        "pool": pool,
    }
    tmp_path.mkdir(exist_ok=True)
    log = tmp_path / "log.jsonl"
    with Records(log) as records:
        model, report = train_with(model_fn, loss_fn, records=records, **settings | changes)
    told = [json.loads(line) for line in log.read_text().splitlines()]
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    return flat, report, [each for each in told if each["event"] == "round"]


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    return run(pool, tmp_path_factory.mktemp("undisturbed"))[0]


def check(recovery: AbstractRecovery, outcome: tuple[torch.Tensor, RunReport, list[dict[str, Any]]]) -> torch.Tensor:
    """Every round is accounted for; the parameters."""
    parameters, report, told = outcome
    assert report.rounds == len(report.losses) == ROUNDS
    assert [each["iteration"] for each in told] == list(range(1, ROUNDS + 1))
    whole = [min(BATCH, 96 - (number % 4) * BATCH) for number in range(ROUNDS)]
    if recovery.name == Ignore.name:
        assert all(0 < each["samples"] <= samples for each, samples in zip(told, whole, strict=True))
    else:
        assert [(each["updates"], each["samples"]) for each in told] == [(3, samples) for samples in whole]
    return parameters


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_whatever_is_hit_every_round_is_applied_and_not_a_bit_is_lost(
    nodes: Nodes, pool: Pool, undisturbed: torch.Tensor, tmp_path: Path
) -> None:
    blows_dealt = 0
    for seed in range(FIRST_SEED, FIRST_SEED + RUNS):
        chance = random.Random(f"chaos {seed}")
        recovery: AbstractRecovery = chance.choice((FromServers(), Checkpoint(every=chance.choice((1, 2, 5))), Ignore()))
        saved = isinstance(recovery, Checkpoint)
        targets = chance.choice(((Target.WORKER,), (Target.WORKER, Target.SERVER), tuple(Target)))
        blows = draw_blows(seed, rounds=ROUNDS, num=chance.randrange(1, 5), targets=targets)
        storm = Storm(blows, saved=saved, kill_node=nodes.kill, spared_nodes=frozenset({nodes.head}))
        try:
            outcome = run(
                pool,
                tmp_path / f"seed-{seed}",
                recovery=recovery,
                directory=tmp_path / f"seed-{seed}" / "saved" if saved else None,
                spares=chance.randrange(3),
                on_round=storm,
            )
        finally:
            storm.finish()
            nodes.complete()
        parameters = check(recovery, outcome)
        assert recovery.name == Ignore.name or torch.equal(parameters, undisturbed), f"seed {seed}: {storm.dealt}"
        blows_dealt += len(storm.dealt)
    assert blows_dealt >= RUNS, "most blows must hit somebody"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_handlers_that_take_longer_than_a_heartbeat_make_no_sound_process_late(
    pool: Pool, undisturbed: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers hang; to end a process takes so long that all others seem silent meanwhile, and so do some rounds."""
    heartbeat_s = HEARTBEAT_S / 2
    kill = Crew.kill

    def kill_slowly(crew: Crew[int], number: int) -> None:
        kill(crew, number)
        time.sleep(1.25 * heartbeat_s)

    monkeypatch.setattr(Crew, "kill", kill_slowly)
    for seed in range(FIRST_SEED, FIRST_SEED + 1 + RUNS // 20):
        chance = random.Random(f"slow {seed}")
        blows = [
            Blow(version=2, target=Target.WORKER, death=Death.STOP, delay_s=chance.choice((0.0, 0.05)), pick=pick)
            for pick in (0.0, 0.5)
        ]
        storm = Storm(blows, saved=False)

        def on_round(runtime: RunControl, storm: Storm = storm, slow: int = chance.randrange(3, ROUNDS)) -> None:
            storm(runtime)
            if runtime.version == slow:
                time.sleep(1.25 * heartbeat_s)

        try:
            outcome = run(pool, tmp_path / f"seed-{seed}", spares=2, on_round=on_round, heartbeat_s=heartbeat_s)
        finally:
            storm.finish()
        assert {failure.who for failure in outcome[1].failures} == {whom for _, whom in storm.dealt} == {"worker 0", "worker 1"}
        assert torch.equal(check(FromServers(), outcome), undisturbed)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_death_of_a_node_costs_no_parameter_and_no_round(
    nodes: Nodes, pool: Pool, undisturbed: torch.Tensor, tmp_path: Path
) -> None:
    seen: list[dict[str, str]] = []

    def note(runtime: Any) -> None:
        seen.append(runtime.nodes())
        storm(runtime)

    blow = Blow(version=3, target=Target.NODE, death=Death.KILL, delay_s=0.0, pick=0.0)
    storm = Storm([blow], saved=False, kill_node=nodes.kill, spared_nodes=frozenset({nodes.head}))
    nodes.await_all()
    outcome = run(pool, tmp_path, on_round=note, rounds=ROUNDS, spares=1)
    nodes.complete()
    (dead,) = {whom for _, whom in storm.dealt}
    # That a spare is gone may be told after the last round, which does not wait for it.
    victims = {name for name, node in seen[2].items() if node == dead and not name.startswith("spare")}
    assert len({seen[0][f"server {server}"] for server in range(3)}) == 3, "no two copies of a shard are on one node"
    assert any(name.startswith("server") for name in victims)
    assert victims <= {failure.who for failure in outcome[1].failures}
    assert torch.equal(check(FromServers(), outcome), undisturbed)
