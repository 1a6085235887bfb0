"""A paced host lasts as long as its speed says, whatever this machine does."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lab_rig import CLUSTER
from torch import nn

from tatami.cluster import Cluster, OwnLink, Processor
from tatami.errors import ClusterError, InputError, LabError
from tatami.lab import Lab, missing, plan_lab
from tatami.lab.lab_state import pace_file, write_pace
from tatami.lab.pacing import _CROSSING_S, Pacing
from tatami.lab.plan import BALANCE

FAST = replace(CLUSTER, processors=tuple(replace(each, speed=2e9 * each.speed) for each in CLUSTER.processors))
PRODUCT_FLOP = 2 * 32 * 16 * 8 + BALANCE * 4 * (32 * 16 + 16 * 8 + 32 * 8)
REASON = missing()
BUSY = """
import json, sys, time, torch, tatami
comm = tatami.init()
a, began_s = torch.ones(256, 256), time.monotonic()
for _ in range(20):
    torch.mm(a, a)
taken_s = comm.allgather_object(time.monotonic() - began_s)
if comm.rank == 0: open(sys.argv[1], "w").write(json.dumps(taken_s))
"""


class FakeClock:
    """Waiting is what lets time pass, and what the test adds."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.waits_s: list[float] = []

    def now(self) -> float:
        return self.time_s

    def wait(self, duration_s: float) -> None:
        self.waits_s.append(duration_s)
        self.time_s += duration_s


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def pacing(clock: FakeClock, tmp_path: Path) -> Pacing:
    write_pace(tmp_path, 0, flop_per_s=PRODUCT_FLOP, balance=BALANCE)  # a second for each product
    return Pacing(pace_file(tmp_path, 0), clock=clock.now, wait=clock.wait)


def test_a_product_lasts_as_its_flop_and_bytes_say(pacing: Pacing, clock: FakeClock, tmp_path: Path) -> None:
    a, b = torch.ones(32, 16), torch.ones(16, 8)
    with pacing:
        torch.mm(a, b)
        assert clock.waits_s == pytest.approx([1.0])
        clock.time_s += 0.0005  # Python between two operations is hidden
        torch.mm(a, b)
        assert clock.time_s == pytest.approx(2.0)
        clock.time_s += 5  # a wait for others is not
        torch.mm(a, b)
        assert clock.time_s == pytest.approx(8.0)
        write_pace(tmp_path, 0, flop_per_s=2 * PRODUCT_FLOP, balance=BALANCE)
        torch.mm(a, b)
        assert clock.time_s == pytest.approx(8.5)
    torch.mm(a, b)
    assert clock.time_s == pytest.approx(8.5), "outside of it nothing waits"
    assert pacing.modelled_s == pytest.approx(3.5)
    assert pacing.late_s == 0


def test_to_look_at_small_operations_is_not_time_of_the_host(pacing: Pacing, clock: FakeClock) -> None:
    a, b, one = torch.ones(32, 16), torch.ones(16, 8), torch.ones(1)
    real = pacing._clock

    def ticking() -> float:
        clock.time_s += 1e-5
        return real()

    pacing._clock = ticking
    with pacing:
        for _ in range(2):
            torch.mm(a, b)
            for _ in range(300):  # 3 ms of Python, 3 ms in torch, 3 ms and what it takes to come here to look
                one.detach()
        second_s = 1.0 + 300 * (3e-5 - 1e-5 - _CROSSING_S) + 1.0
        assert clock.time_s == pytest.approx(second_s + 300 * 3e-5, abs=1e-4), "the second product waits for less"
        clock.time_s += 5
        began_s = clock.time_s
        torch.mm(a, b)
        assert clock.time_s == pytest.approx(began_s + 1.0, abs=1e-4), "who waited for others is not behind"
    assert pacing.late_s < 0.02


def test_views_and_what_is_traced_take_no_time(pacing: Pacing, clock: FakeClock) -> None:
    network = nn.Linear(16, 8)
    x = torch.ones(32, 16)
    with pacing:
        x.view(16, 32).transpose(0, 1)[:3].detach()
        torch.ones(4, 4, device="meta") @ torch.ones(4, 4, device="meta")
        torch.export.export(network, (x,), strict=False)
    assert clock.waits_s == []


def test_a_backward_pass_is_paced_as_well(pacing: Pacing, clock: FakeClock) -> None:
    network = nn.Linear(16, 8, bias=False)
    x = torch.ones(32, 16, requires_grad=True)
    with pacing:
        output = network(x)
        forward_s = clock.time_s
        output.backward(torch.ones(32, 8))
    assert forward_s == pytest.approx(1.0)
    assert clock.time_s - forward_s > 2.0, "a product for the input's gradient, one for the weight's, and what adds them up"


def test_every_form_of_a_product_is_counted(pacing: Pacing, clock: FakeClock) -> None:
    a, b, total = torch.ones(32, 16), torch.ones(16, 8), torch.zeros(32, 8)
    x, weight = torch.ones(2, 4, 8, 8), torch.ones(4, 4, 3, 3)
    forms: list[tuple[Callable[[], object], int]] = [
        (lambda: torch.mm(a, b, out=total), 2 * 32 * 16 * 8),
        (lambda: total.addmm_(a, b), 2 * 32 * 16 * 8),
        (lambda: torch.addmm(total, a, b, out=total), 2 * 32 * 16 * 8),
        (lambda: total.unsqueeze(0).baddbmm_(a.unsqueeze(0), b.unsqueeze(0)), 2 * 32 * 16 * 8),
        (lambda: nn.functional.conv2d(x, weight, padding=1), 2 * 2 * 4 * 64 * 36),
        (lambda: nn.functional.scaled_dot_product_attention(x, x, x), 2 * 2 * (2 * 4 * 8 * 8 * 8)),
    ]
    with pacing:
        for form, flop in forms:
            began_s = clock.time_s
            form()
            assert clock.time_s - began_s > flop / PRODUCT_FLOP


def test_lateness_is_told(pacing: Pacing, capsys: pytest.CaptureFixture[str]) -> None:
    pacing.tell(0)
    assert capsys.readouterr().err == ""
    pacing.modelled_s, pacing.late_s = 10.0, 1.0
    pacing.tell(3)
    assert capsys.readouterr().err == (
        "rank 3: this machine was 1 s later than the host that it plays would be, which computed for 10 s: times are too long. "
        "Play slower hosts (--dilate), or fewer\n"
    )


def test_all_of_a_dilated_lab_takes_longer() -> None:
    plan = plan_lab(FAST, cores=2.0, paced=True, dilation=4.0)
    assert list(plan.cluster.speeds.values()) == [0.5e9, 0.5e9, 0.25e9]
    assert plan.cluster.network.bandwidth_bytes_per_s == FAST.network.bandwidth_bytes_per_s / 4
    assert plan.cluster.network.latency_s == FAST.network.latency_s * 4
    assert plan.describe() == (
        "lab: 3 hosts, 3 processors; paced: the fastest processor computes 0.5 Gflop/s; all takes 4 times as long as the "
        "cluster file says"
    )
    own = Processor(name="p4", speed=1e9, host="h4", link=OwnLink(bandwidth_bytes_per_s=8e6))
    plan = plan_lab(Cluster(processors=(*FAST.processors, own)), cores=2.0, paced=True, dilation=2.0)
    assert plan.cluster.link_of("h4").bandwidth_bytes_per_s == 4e6


def test_what_cannot_be_paced_is_refused() -> None:
    with pytest.raises(ClusterError, match="give speeds in flop/s, as 20e9, not 1"):
        plan_lab(CLUSTER, cores=2.0, paced=True)
    with pytest.raises(InputError, match="only a paced lab can dilate time"):
        plan_lab(FAST, cores=2.0, dilation=2.0)
    with pytest.raises(InputError, match="dilate must be a finite number > 0, not -1"):
        plan_lab(FAST, cores=2.0, paced=True, dilation=-1.0)
    with pytest.raises(InputError, match="only a paced lab has a balance"):
        plan_lab(FAST, cores=2.0, balance=1.0)
    with pytest.raises(InputError, match="balance must be a finite number > 0, not 0"):
        plan_lab(FAST, cores=2.0, paced=True, balance=0.0)


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_no_paced_host_is_faster_than_its_speed(tmp_path: Path) -> None:
    script, found = tmp_path / "busy.py", tmp_path / "found.json"
    script.write_text(BUSY, encoding="utf-8")
    with Lab(FAST, paced=True, dilation=2.0) as lab:
        assert lab.run(["python", str(script), str(found)], timeout_s=300) == 0
        lab.set_speed("h1", 4e9)
        assert pace_file(Path(lab._state.folder), 0).read_text() == "2000000000.0 8.0"
        with pytest.raises(LabError, match="a paced lab waits between torch's operations, and true is no Python script"):
            lab.run(["true"])
        with pytest.raises(LabError, match="a paced lab has no quotas, and true would run at full speed"):
            lab.spawn("h1", ["true"])
    flop = 20 * (2 * 256**3 + BALANCE * 4 * 3 * 256**2)
    for taken_s, speed in zip(json.loads(found.read_text()), (1e9, 1e9, 0.5e9), strict=True):
        assert taken_s > 0.99 * flop / speed
