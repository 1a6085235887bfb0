"""The rule of thumb for two-dimensional tiles, by hand, and what it says."""

from __future__ import annotations

import pytest

from tatami.cluster import Cluster, Link, Processor
from tatami.tiling import Advice, AlphaBetaCost, advise, compare
from tatami.workload import Workload


def test_rho_and_q_of_the_papers_perceptron() -> None:
    """Eight processors, 229 x 800 weights and 26 x 1,024 outputs; 100 ms of exchange for each 50 ms of computing."""
    workload = Workload.mlp(203, 800, 26, samples=1024)
    (weighted,) = compare(["weighted"], cluster=Cluster.from_speeds([1.0] * 8), workload=workload)
    advice = advise(weighted)
    assert advice.rho == pytest.approx(8 * 229 * 800 / (26 * 1024))
    assert advice.q == weighted.predicted.horizontal / weighted.predicted.compute


def test_the_gain_of_the_rule() -> None:
    assert Advice(rho=64.0, q=1.0).gain == pytest.approx(2 / 1.25)
    assert Advice(rho=1.0, q=1.0).gain == 1.0
    assert Advice(rho=0.0, q=1.0).gain == 1.0


def test_each_case_has_its_sentence() -> None:
    clear = Advice(rho=64.0, q=1.0).sentence(1.4)
    assert clear.startswith("Use two-dimensional tiles: rho = 64 (weights over outputs), q = 1 (exchange over computing)")
    assert clear.endswith("promise about 1.6 x weighted data parallelism.")
    no, predicted = Advice(rho=64.0, q=0.1).sentence(1.01), Advice(rho=2.0, q=0.1).sentence(1.2)
    assert no.startswith(
        "Weighted data parallelism does about as well; by the rule of thumb tiles pay from 32 and 0.5 on: rho = 64"
    )
    assert predicted.startswith("Tiles are predicted to be 1.20 x weighted data parallelism, although by the rule")
    rows = Advice(rho=2.0, q=0.1).sentence(1.2, has_columns=False)
    assert rows.startswith(
        "Fewer machines, or other shares of the samples, are predicted to be 1.20 x weighted data parallelism; "
    )
    assert Advice(rho=0.0, q=3.0).sentence(1.0).startswith("Nothing in this network splits over units")
    for told in (clear, no, predicted):
        assert told.endswith(".")
        assert "\n" not in told


@pytest.mark.parametrize("samples", [1024, 2048, 4096])
def test_where_the_rule_promises_much_so_does_the_prediction(samples: int) -> None:
    processors = tuple(Processor(name=f"p{index}", speed=2e10, host=f"h{index}") for index in range(16))
    cluster = Cluster(processors=processors, network=Link(bandwidth_bytes_per_s=2e7, latency_s=5e-5))
    workload = Workload.mlp(1024, 4096, 1024, samples=samples)
    weighted, timed = compare(["weighted", "timed"], cluster=cluster, workload=workload, cost=AlphaBetaCost())
    advice = advise(weighted)
    assert advice.rho >= 32
    assert advice.q >= 0.5
    assert advice.gain > 1.3
    assert weighted.predicted_s / timed.predicted_s > 0.7 * advice.gain


def test_a_network_without_blocks() -> None:
    workload = Workload(samples=64, replicated_parameters=1000, replicated_flop_per_sample=10**6)
    (weighted,) = compare(["weighted"], cluster=Cluster.from_speeds([1.0] * 4), workload=workload)
    assert advise(weighted).rho == 0
