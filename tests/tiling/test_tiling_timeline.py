"""What each processor does in an iteration: the parts sum to the price."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tatami.cluster import Cluster, OwnLink, Processor, SpeedTable
from tatami.tiling import AlphaBetaCost, Layout, Replica, plan, timeline
from tatami.workload import Workload, gpt_workload

GPT = gpt_workload(layers=2, width=48, heads=6, tokens=16, vocabulary=100, samples=40)
PROCESSORS: st.SearchStrategy[dict[str, object]] = st.builds(
    dict,
    speed=st.floats(1e6, 1e9) | st.just(SpeedTable([(1e6, 1e7), (1e9, 1e8)])),
    host=st.sampled_from("ab"),
    spread=st.none() | st.floats(0, 0.5),
    message_s=st.sampled_from([0.0, 1e-3]),
    call_s=st.sampled_from([0.0, 1e-3]),
    step_s=st.sampled_from([0.0, 1.0]),
    copy_bytes_per_s=st.sampled_from([1e6, 1e9]),
)


@given(
    drawn=st.lists(PROCESSORS, min_size=1, max_size=5), workload=st.sampled_from([GPT, Workload.mlp(20, 30, 10, samples=50)])
)
@settings(max_examples=60, deadline=None)
@pytest.mark.filterwarnings("ignore:.*leaves out")
def test_the_parts_of_every_processor_sum_to_the_price(drawn: list[dict[str, object]], workload: Workload) -> None:
    cluster = Cluster(processors=tuple(Processor(name=f"p{i}", **each) for i, each in enumerate(drawn)))  # type: ignore[arg-type]
    found = plan(cluster=cluster, workload=workload, idle=True)
    times = timeline(found.layout, cluster=cluster, workload=workload)
    assert [each.processor for each in times] == list(found.layout.processors)
    for each in times:
        parts_s = (each.compute_s, each.sums_s, each.gradients_s, each.wait_s)
        assert min(parts_s) >= 0
        assert sum(parts_s) == pytest.approx(found.predicted_s, rel=1e-9)
        assert each.send_s == each.sums_s + each.gradients_s
    assert max(each.gradients_s for each in times) == pytest.approx(found.predicted.gradients)
    assert max(each.sums_s for each in times) == pytest.approx(found.predicted.tensor_parallel)
    assert max(each.compute_s for each in times) <= found.predicted.compute * (1 + 1e-9)


def test_who_has_less_to_do_waits() -> None:
    """Equal shares for speeds 1 and 3: the fast one waits as long as it would compute twice more."""
    layout = Layout(replicas=tuple(Replica(width=0.5, processors=(name,), heights=(1.0,)) for name in ("slow", "fast")))
    cluster = Cluster(
        processors=(
            Processor(name="slow", speed=1.0, link=OwnLink(bandwidth_bytes_per_s=1e6, latency_s=0.0)),
            Processor(name="fast", speed=3.0),
        )
    )
    workload = Workload.mlp(30, 40, 10, samples=100)
    cost = AlphaBetaCost(flop_per_s=1e6)
    slow, fast = timeline(layout, cluster=cluster, workload=workload, cost=cost)
    assert (slow.compute_s, fast.compute_s) == pytest.approx((workload.flop(width=0.5, height=1.0) / 1e6, slow.compute_s / 3))
    assert slow.sums_s == fast.sums_s == 0
    assert fast.gradients_s == pytest.approx(slow.gradients_s)
    assert fast.gradients_s >= 4 * 1600 / 1e6, "the pace of the slow one's link"
    assert (slow.wait_s, fast.wait_s) == pytest.approx((0.0, 2 * fast.compute_s))
