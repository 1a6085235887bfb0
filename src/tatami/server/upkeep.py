"""How the state of a run survives: servers are replaced, shards are copied, checkpoints are written and read."""

from __future__ import annotations

from tatami.server import actions as act
from tatami.server import events as ev
from tatami.server.actions import Cause
from tatami.server.fleet import Fleet
from tatami.server.roster import Roster
from tatami.server.saving import Saved, Saving
from tatami.server.standing import RunPhase, Standing


class Upkeep:
    """Orders what keeps the state of a run safe, and takes the answers.

    Args:
        run: where the run stands.
        rolls_back: the recovery goes back to checkpoints.
    """

    def __init__(self, run: Standing, *, roster: Roster, fleet: Fleet, saving: Saving, rolls_back: bool) -> None:
        self._run = run
        self._roster = roster
        self._fleet = fleet
        self._saving = saving
        self._rolls_back = rolls_back
        self._copying: tuple[int, ...] = ()
        self._copies_due: set[tuple[int, int]] = set()
        self._write_began_s = 0.0

    # -- servers --------------------------------------------------------------------------------------------------

    def lose_server(self, server: int) -> bool:
        """Note that a server is gone; returns whether the run goes on with the copies that the others hold."""
        if not self._fleet.lose(server):
            return False
        if self._fleet.lost_shards() or self._run.phase is RunPhase.RESTART:
            self._restart_servers(server)
            return False
        self._replace_server(server)
        return True

    def order_again(self) -> None:
        """Order what was under way once more, of the servers that are left."""
        match self._run.phase:
            case RunPhase.WRITE:
                self.write()
            case RunPhase.READ:
                self.read()
            case RunPhase.FETCH:
                self.fetch()
            case RunPhase.COPY:
                self.copy()

    def _replace_server(self, server: int) -> None:
        """Have the copies that a server held made again on a new one."""
        what = f"server {server} is gone; its shards live on elsewhere"
        if self._run.stopping is not None or self._roster.all_done():
            return
        if self._roster.restarts_left:
            self._start_server(server)
            self._roster.warn(f"{what}, and are copied to a new one")
        else:
            self._roster.warn(f"{what}, without another copy from now on: all restarts are used up")

    def _restart_servers(self, server: int) -> None:
        gone = self._fleet.gone()
        saved = self._saving.saved
        can = self._rolls_back and saved is not None and self._run.stopping is None
        if not can or self._roster.restarts_left < len(gone):
            where = "nothing was saved" if saved is None else f"the last checkpoint is of version {saved.version}"
            reason = f"server {server} is gone, and with it the only copy of its shards; {where}. replicas=2 survives this"
            self._run.do(act.Stop(cause=Cause.SHARDS_LOST, reason=reason))
            return
        self._run.phase = RunPhase.RESTART
        for each in gone:
            self._start_server(each)

    def _start_server(self, server: int) -> None:
        self._roster.restarts_left -= 1
        self._fleet.starting.add(server)
        self._run.do(act.StartServer(server=server))

    # -- copies ---------------------------------------------------------------------------------------------------

    @property
    def is_copied(self) -> bool:
        """Whether no copy is awaited."""
        return not self._copies_due

    def copy(self) -> None:
        """Copy shards to new servers. No worker computes meanwhile, so no update can reach one copy and miss the other."""
        ticket = self._run.begin(RunPhase.COPY)
        copies = self._fleet.copies_due()
        self._copies_due = {(shard, server) for shard, _, server in copies}
        self._copying = tuple(self._fleet.blank)
        for shard, source, server in copies:
            names = {"ticket": ticket, "shard": shard, "source": source, "server": server}
            self._run.do(act.CopyShard(attempt=self._run.attempt, clocks=self._roster.clocks, **names))

    def one_copied(self, order: act.CopyShard) -> None:
        """Note that a new server holds a copy of a shard."""
        self._copies_due.discard((order.shard, order.server))

    def all_copied(self) -> None:
        """Note that the new servers hold all their shards."""
        for server in self._copying:
            self._fleet.filled(server)
        self._run.phase = RunPhase.COLLECT

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Write a checkpoint of what is applied."""
        ticket = self._run.begin(RunPhase.WRITE)
        self._write_began_s = self._run.now_s
        self._run.do(act.WriteCheckpoint(ticket=ticket, version=self._run.version, clocks=self._roster.clocks))

    def written(self, event: ev.CheckpointWritten) -> None:
        """Note how the writing ended, and stop where the run waited for nothing else."""
        run, order = self._run, event.order
        if not run.awaits(RunPhase.WRITE, order.ticket):
            return
        run.phase = RunPhase.COLLECT
        # Also where it failed: it is not tried again at once, but after the next interval.
        self._saving.clock = self._roster.slowest(default=self._saving.clock)
        if event.problem is None:
            self._saving.written(Saved(version=order.version, clocks=order.clocks), took_s=run.now_s - self._write_began_s)
        elif run.stopping is None and self._saving.is_vital:
            run.do(act.Stop(cause=Cause.CHECKPOINT, reason=f"the first checkpoint failed: {event.problem}"))
        else:
            self._roster.warn(f"no checkpoint was written at version {run.version}: {event.problem}")
        if run.stopping is not None:
            run.do(run.stopping)

    def read(self) -> None:
        """Go back to the last checkpoint."""
        assert self._saving.saved is not None  # written before the first round is opened
        ticket = self._run.begin(RunPhase.READ)
        self._run.roll_back = False
        self._run.attempt += 1
        version, attempt = self._saving.saved.version, self._run.attempt
        self._run.do(act.ReadCheckpoint(ticket=ticket, version=version, attempt=attempt, servers=self._fleet.up()))

    def was_read(self, event: ev.CheckpointRead) -> None:
        """Note that all servers are back at the checkpoint."""
        if not self._run.awaits(RunPhase.READ, event.order.ticket):
            return
        for server in event.order.servers:
            self._fleet.filled(server)
        saved = Saved(version=event.version, clocks=event.clocks)
        self._run.version, self._saving.saved = saved.version, saved
        self._saving.clock = saved.slowest
        self._roster.return_to(dict(saved.clocks), slowest=saved.slowest)
        self._run.phase = RunPhase.COLLECT

    def fetch(self) -> None:
        """Bring the result out of the servers."""
        self._run.do(act.FetchResult(ticket=self._run.begin(RunPhase.FETCH)))
