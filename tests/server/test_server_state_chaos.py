"""Thousands of seeded runs of the pure protocol: blows of every kind, and the exact account of what was applied.

TATAMI_STATE_CHAOS_RUNS asks for more; `make chaos` does.
"""

import os
import random
from collections import Counter

import pytest
from server_rig import Push, World

from tatami.server import ASP, BSP, SSP, Backup, Checkpoint, FromServers, Ignore
from tatami.server import actions as act
from tatami.server import events as ev
from tatami.server.run_settings import RunSettings

RUNS = int(os.environ.get("TATAMI_STATE_CHAOS_RUNS", "1000"))
FIRST_SEED = int(os.environ.get("TATAMI_CHAOS_SEED", "0"))

pytestmark = pytest.mark.timeout(900 + RUNS / 10)


def settings_of(chance: random.Random) -> RunSettings:
    servers = chance.randrange(1, 5)
    return RunSettings(
        rounds=chance.randrange(1, 8),
        workers=chance.randrange(1, 6),
        servers=servers,
        replicas=chance.randrange(1, min(servers, 3) + 1),
        spares=chance.randrange(3),
        restarts=chance.randrange(6),
        consistency=chance.choice((BSP(), BSP(), SSP(staleness=1), ASP(), Backup(workers=1))),
        recovery=chance.choice((FromServers(), Ignore(), Checkpoint(), Checkpoint(every=2), Checkpoint(every="daly"))),
        clip_norm=1.0 if chance.random() < 0.5 else None,
        save_every=chance.choice((None, 2)),
    )


def storm(world: World, chance: random.Random) -> None:
    """Deliver in any order, and strike in between."""
    for _ in range(chance.randrange(20, 200)):
        if world.end is not None or not world.pending:
            return
        world.deliver(chance.randrange(len(world.pending)))
        if world.end is not None or chance.random() > 0.1:
            continue
        match chance.randrange(6):
            case 0 | 1 if world.alive:
                world.kill(process := chance.choice(sorted(world.alive)))
                if chance.random() < 0.5:
                    lost = [each for each in world.pending if isinstance(each, Push) and each.task.process == process]
                    world.pending = [each for each in world.pending if each not in lost]
            case 2 if world.alive:
                world.hang(chance.choice(sorted(world.alive)))
            case 3 if len(world.servers) > 1:
                world.kill_server(chance.choice(sorted(world.servers)))
            case 4:
                world.tell(ev.WorkerJoins(at_s=world.time_s))
            case 5:
                world.tell(ev.WorkerLeaves(at_s=world.time_s, worker=chance.randrange(6)))
            case _:
                pass


def test_every_run_ends_with_each_update_applied_once() -> None:
    ends: Counter[str] = Counter()
    copied = 0
    for seed in range(FIRST_SEED, FIRST_SEED + RUNS):
        chance = random.Random(f"state {seed}")
        world = World(settings_of(chance))
        storm(world, chance)
        world.drain()
        assert world.end is not None, f"seed {seed} does not end"
        ends[type(world.end).__name__] += 1
        copied += len(world.copied)
        if isinstance(world.end, act.Stop):
            continue
        counts = Counter((each.worker, each.round) for commit in world.result for each in commit)
        assert all(count == 1 for count in counts.values()), f"seed {seed}: an update was applied twice"
        assert len(world.result) == world.coordinator.version, f"seed {seed}"
        if world.settings.consistency.lockstep:
            rounds = [{each.round for each in commit} for commit in world.result]
            assert rounds == [{number} for number in range(world.settings.rounds)], f"seed {seed}"
    assert ends["Finish"] > RUNS // 2, ends
    assert copied > RUNS // 100, "lost copies were made again in some of the runs"
