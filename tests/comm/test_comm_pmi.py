"""What MPICH's ranks ask of the program that started them, and what they are answered."""

from __future__ import annotations

from tatami.comm.pmi import PmiServer, Reply


def said(server: PmiServer, rank: int, line: str) -> list[str]:
    replies = server.handle(rank, line)
    assert all(reply.rank == rank for reply in replies)
    return [reply.line for reply in replies]


def test_ranks_join_and_leave() -> None:
    server = PmiServer(2)
    greeting = "cmd=init pmi_version=1 pmi_subversion=1"
    assert said(server, 1, greeting) == ["cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"]
    assert (server.joined, server.left) == ({1}, set())
    assert said(server, 1, "cmd=get_universe_size") == ["cmd=universe_size size=2 rc=0"]
    assert said(server, 1, "cmd=finalize") == ["cmd=finalize_ack rc=0"]
    assert (server.joined, server.left) == ({1}, {1})


def test_what_one_rank_puts_another_gets_though_it_has_signs_of_its_own() -> None:
    server = PmiServer(2)
    assert said(server, 0, "cmd=put kvsname=x key=P0-card value=0A=f#3;b:c") == ["cmd=put_result rc=0 msg=success"]
    assert said(server, 1, "cmd=get kvsname=x key=P0-card") == ["cmd=get_result rc=0 msg=success value=0A=f#3;b:c"]
    assert said(server, 1, "cmd=get kvsname=x key=P1-card") == ["cmd=get_result rc=-1 msg=key_not_found value=unknown"]


def test_all_ranks_are_on_one_machine() -> None:
    answer = said(PmiServer(3), 2, "cmd=get kvsname=x key=PMI_process_mapping")
    assert answer == ["cmd=get_result rc=0 msg=success value=(vector,(0,1,3))"]


def test_ranks_meet_when_the_last_has_come_and_may_meet_again() -> None:
    server = PmiServer(3)
    for _ in range(2):
        assert server.handle(2, "cmd=barrier_in") == server.handle(0, "cmd=barrier_in") == []
        assert server.handle(1, "cmd=barrier_in") == [Reply(rank=rank, line="cmd=barrier_out rc=0") for rank in range(3)]


def test_a_rank_that_wants_the_end_is_noted_with_its_exit_code() -> None:
    server = PmiServer(2)
    assert server.handle(1, "cmd=abort exitcode=7 message=gone") == []
    assert server.aborted == {1: 7}


def test_no_two_jobs_have_one_name_for_mpi_names_its_shared_memory_after_it() -> None:
    names = {said(PmiServer(1), 0, "cmd=get_my_kvsname")[0] for _ in range(20)}
    assert len(names) == 20


def test_what_only_mpiexec_has_is_refused_and_not_left_without_an_answer() -> None:
    assert said(PmiServer(1), 0, "mcmd=spawn") == ["cmd=spawn_result rc=-1 msg=not_supported info=not_supported"]
    published = said(PmiServer(1), 0, "cmd=publish_name service=x port=y")
    assert published == ["cmd=publish_result rc=-1 msg=not_supported info=not_supported"]
