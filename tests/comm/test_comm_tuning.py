"""`auto`: by the table of this cluster where there is a fresh one, by the cost model where not."""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from tatami.collective import SizeTimings, TuningTable
from tatami.comm import AbstractCommunicator, AllReduce, AllReduceSpec, run_threads
from tatami.comm.tuning import candidates, cheapest, fingerprint_of, keep_table, read_table, table_path, tuned_bucket_bytes
from tatami.outputs import write_text


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def chosen(comm: AbstractCommunicator, size: int, *, fixed_order: bool = False) -> str:
    with AllReduce(comm, AllReduceSpec(size=size, fixed_order=fixed_order)) as reduce:
        return reduce.algorithm


def test_auto_goes_by_the_table_that_was_kept() -> None:
    def tuned(comm: AbstractCommunicator) -> None:
        keep_table(comm, table(comm))

    def body(comm: AbstractCommunicator) -> list[str]:
        return [chosen(comm, 256), chosen(comm, 2**18), chosen(comm, 256, fixed_order=True)]

    run_threads(tuned, size=2)
    assert run_threads(body, size=2) == [["native", "ring", "halving_doubling"]] * 2
    assert run_threads(body, size=3) == [["shared"] * 3] * 3  # another cluster


def table(comm: AbstractCommunicator) -> TuningTable:
    return TuningTable(
        fingerprint=fingerprint_of(comm),
        timings=(
            SizeTimings(size_bytes=1024, seconds={"native": 1e-6, "ring": 4e-6, "halving_doubling": 3e-6}),
            SizeTimings(size_bytes=2**20, seconds={"native": 9e-4, "ring": 4e-4, "halving_doubling": 5e-4}),
        ),
    )


def test_buckets_are_as_small_as_the_links_allow() -> None:
    def body(comm: AbstractCommunicator) -> list[int | None]:
        before = tuned_bucket_bytes(comm)
        # 1, 4, 8 and 8.2 MB/ms: 4 MiB is the first with 80 % of the best.
        seconds = {2**18: 2.62e-4, 2**20: 2.62e-4, 2**22: 5.24e-4, 2**24: 2.05e-3}
        timings = tuple(
            SizeTimings(size_bytes=size, seconds={"ring": took_s, "native": 1.0}) for size, took_s in seconds.items()
        )
        keep_table(comm, replace(table(comm), timings=timings))
        return [before, tuned_bucket_bytes(comm)]

    assert run_threads(body, size=2) == [[None, 2**22]] * 2


@pytest.mark.parametrize(("size_bytes", "bucket_bytes"), [(2**10, 2**20), (2**21, 2**21), (2**28, 2**26)])
def test_buckets_have_bounds(size_bytes: int, bucket_bytes: int) -> None:
    def body(comm: AbstractCommunicator) -> int | None:
        keep_table(comm, replace(table(comm), timings=(SizeTimings(size_bytes=size_bytes, seconds={"ring": 1e-3}),)))
        return tuned_bucket_bytes(comm)

    assert run_threads(body, size=2) == [bucket_bytes] * 2


def test_a_stale_table_is_ignored_with_a_warning() -> None:
    def stale(comm: AbstractCommunicator) -> None:
        then = replace(fingerprint_of(comm), tatami="0.0.1", cpus=("abacus",))
        keep_table(comm, replace(table(comm), fingerprint=then))

    run_threads(stale, size=2)
    with pytest.warns(UserWarning, match=r"stale and ignored \(cpus: abacus, now .*; tatami: 0\.0\.1, now"):
        assert run_threads(lambda comm: chosen(comm, 256), size=2) == ["shared"] * 2


def test_a_damaged_table_is_ignored_with_a_warning() -> None:
    here = run_threads(fingerprint_of, size=1)[0]
    write_text(table_path(here), "{}")
    with pytest.warns(UserWarning, match="is ignored: not a tuning table: KeyError: 'format'"):
        assert read_table(here) is None


def test_where_there_is_no_table_there_is_no_warning() -> None:
    here = run_threads(fingerprint_of, size=1)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_table(here) is None


def test_candidates_follow_hosts_and_windows() -> None:
    def body(comm: AbstractCommunicator) -> None:
        one_host = candidates(comm, hosts=comm.hosts)
        assert "shared" in one_host
        assert not any(name.startswith("hierarchical") for name in one_host)
        two_hosts = candidates(comm, hosts=("a", "a", "b", "b"))
        assert "shared" not in two_hosts
        assert {"hierarchical+ring", "hierarchical+native", "hierarchical+halving_doubling"} <= set(two_hosts)
        assert not any("native" in name for name in candidates(comm, hosts=("a", "a", "b", "b"), fixed_order=True))

    run_threads(body, size=4)


def test_the_model_prefers_hierarchies_for_large_messages_over_few_links() -> None:
    hosts = ("a", "a", "b", "b", "c", "c", "d", "d")
    among = ("native", "ring", "halving_doubling", "torus", "hierarchical+ring", "hierarchical+halving_doubling")
    assert cheapest(among, size=2**24, size_bytes=2**26, hosts=hosts).startswith("hierarchical")
    assert cheapest((*among, "shared"), size=2**24, size_bytes=2**26, hosts=("a",) * 8) == "shared"
