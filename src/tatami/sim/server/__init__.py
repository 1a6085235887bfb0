"""Parameter-server training, rehearsed: the coordinator and the recoveries of the library on simulated machines."""

from tatami.sim.server.result import ServerRun, SimulatedFailure
from tatami.sim.server.server_setup import Checkpoints, ServerSetup, paper_setup
from tatami.sim.server.simulate import simulate_server

__all__ = ["Checkpoints", "ServerRun", "ServerSetup", "SimulatedFailure", "paper_setup", "simulate_server"]
