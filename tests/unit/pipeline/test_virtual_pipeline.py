"""The shipped Coordinator and StageSessions in virtual time, over a network that delays and reorders."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorpp.coordinator.coordinator import Close, Coordinator
from actorpp.errors import ActorDefinitionError, DeadlockError, MailboxFullError, StageFailedError
from actorpp.runtime import ActorSystem
from actorpp.stages.links import RECEIVE_BUFFERS, SEND_BUFFERS
from actorpp.stages.messages import End, Output, Step
from actorpp.stages.session import GetSessionStats, StageSession
from actorpp.testing import FakeNetwork, run
from tests.support.pipeline import SimulatedPipeline, expected_ids


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = random.Random(seed)
    return tuple(generator.randrange(1000) for _ in range(length))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    stages=st.integers(1, 4),
    depth=st.integers(0, 4),
    lookahead=st.integers(1, 3),
    chunk=st.sampled_from([1, 16, 64, 1000]),
    lengths=st.lists(st.tuples(st.integers(1, 150), st.integers(1, 12)), min_size=1, max_size=6),
    data=st.data(),
)
def test_tokens_do_not_depend_on_stages_depth_or_network(
    seed: int,
    stages: int,
    depth: int,
    lookahead: int,
    chunk: int,
    lengths: list[tuple[int, int]],
    data: st.DataObject,
) -> None:
    max_delay = data.draw(st.sampled_from([0.0, 0.05, 3.0]))

    async def main() -> None:
        async with ActorSystem() as system:
            pipeline = SimulatedPipeline(
                system,
                FakeNetwork(seed, max_delay=max_delay),
                stages=stages,
                depth=depth,
                lookahead=lookahead,
                chunk=chunk,
                running=4,
                pages=60,
            )
            await pipeline.open()
            prompts = [(prompt(length, seed + i), count) for i, (length, count) in enumerate(lengths)]
            answers = [pipeline.submit(ids, count) for ids, count in prompts]
            await pipeline.finish()
            for (ids, count), answer in zip(prompts, answers, strict=True):
                assert tuple(answer.ids) == expected_ids(ids, count)
                assert answer.end == "length"
            assert pipeline.scheduler.pool.used_pages == 0
            pipeline.write(End(epoch=1, seq=pipeline.scheduler.next_seq))
            for session in pipeline.sessions:
                assert (await session.join()).reason == "finished"

    run(main, seed=seed)


def test_a_request_is_computed_though_the_one_that_came_with_it_has_ended() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            pipeline = SimulatedPipeline(
                system, FakeNetwork(), stages=2, depth=1, lookahead=1, chunk=64, running=4, pages=60
            )
            await pipeline.open()
            kept, ended = pipeline.submit(prompt(100), 3), pipeline.submit(prompt(50), 3)
            pipeline.abort(ended)  # overtakes both
            await pipeline.finish()
            assert tuple(kept.ids) == expected_ids(prompt(100), 3)
            assert not ended.ids
            for session in pipeline.sessions:
                await system.kill(session)

    run(main)


def test_chunks_of_one_prompt_are_on_all_stages_at_once() -> None:
    computing: list[int] = []

    def seconds(stage: int, step: Step) -> float:
        computing.append(stage)
        return 1.0

    async def main() -> None:
        async with ActorSystem() as system:
            pipeline = SimulatedPipeline(system, FakeNetwork(0, max_delay=0.01), stages=4, seconds=seconds)
            await pipeline.open()
            answer = pipeline.submit(prompt(640), 1)
            await answer.done.wait()
            # Ten chunks of a second on four stages: 13 s when all stages work at once, 40 s one after the other.
            assert asyncio.get_running_loop().time() < 14
            assert answer.computed == [64 * (i + 1) for i in range(10)]
            for session in pipeline.sessions:
                await system.kill(session)

    run(main)
    assert sorted(computing[6:10]) == [0, 1, 2, 3]


@pytest.mark.parametrize("stages", [1, 3, 8])
def test_how_long_admission_takes_does_not_grow_with_the_number_of_stages(stages: int) -> None:
    """In a full pipeline; a step takes 0.1 s of each stage."""

    async def main() -> None:
        async with ActorSystem() as system:
            pipeline = SimulatedPipeline(system, FakeNetwork(max_delay=0.001), stages=stages, running=40)
            await pipeline.open()
            now = asyncio.get_running_loop().time
            for number in range(2 * stages):
                pipeline.submit(prompt(10, number), 30)
            await asyncio.sleep(0.2 * stages)  # until all of them decode
            for number in range(5):
                asked, before = now(), len(pipeline.log)
                pipeline.submit(prompt(10, 100 + number), 30)
                rid = len(pipeline.requests)
                while not any(  # noqa: ASYNC110 - virtual time: the sleep costs nothing
                    isinstance(entry, Step) and any(segment.rid == rid for segment in entry.segments)
                    for entry in pipeline.log[before:]
                ):
                    await asyncio.sleep(0.01)
                assert now() - asked <= 0.15
            await pipeline.finish()

    run(main)


def test_a_stopped_stage_lets_its_predecessor_proceed_only_to_the_bound() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            pipeline = SimulatedPipeline(system, FakeNetwork(1, max_delay=0.01), stages=3, lookahead=30)
            await pipeline.open()
            pipeline.gates[1].clear()
            ids = prompt(2000)
            answer = pipeline.submit(ids, 3)
            await asyncio.sleep(1000)
            # Stage 1 holds one step in hand and posts no more receives than it has buffers, so that the sends behind
            # them are not done; and stage 0 waits with one computed result for a send buffer.
            assert len(pipeline.hosts[0].steps) == 1 + RECEIVE_BUFFERS + SEND_BUFFERS + 1
            assert pipeline.hosts[1].steps == []
            stats = await pipeline.sessions[1][StageSession.control].ask(GetSessionStats())
            assert stats.received == RECEIVE_BUFFERS
            pipeline.gates[1].set()
            await pipeline.finish()
            assert tuple(answer.ids) == expected_ids(ids, 3)

    run(main)


def test_steps_flow_up_to_the_window_while_outputs_are_held_up() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            network = FakeNetwork(2, max_delay=0.01)
            pipeline = SimulatedPipeline(system, network, stages=4, depth=1, lookahead=1)
            await pipeline.open()
            arrived: list[Output] = []
            pipeline.deliver_output = arrived.append  # type: ignore[method-assign]
            ids = prompt(1000)
            answer = pipeline.submit(ids, 2)
            await asyncio.sleep(100)
            assert [host.steps[-1].segments[0].start for host in pipeline.hosts] == [64 * 5] * 4
            assert len(arrived) == pipeline.scheduler.config.window == 6
            del pipeline.deliver_output
            for output in arrived:
                pipeline.deliver_output(output)
            await pipeline.finish()
            assert tuple(answer.ids) == expected_ids(ids, 2)

    run(main)


def test_a_mailbox_too_small_for_the_window_is_refused_when_built() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            pipeline = SimulatedPipeline(system, FakeNetwork(), stages=2, lookahead=300)
            with pytest.raises(ActorDefinitionError, match="proxy holds 256 messages, but 303 can be in flight"):
                await pipeline.open()

    run(main)


def test_more_than_the_credit_is_refused_by_the_mailbox_not_dropped() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            pipeline = SimulatedPipeline(system, FakeNetwork(max_delay=0.0), stages=2)
            await pipeline.open()
            log = pipeline.sessions[0][StageSession.log]
            for seq in range(1, log.inbox.capacity + 1):  # 0 is missing: none of these can be applied
                log.tell_nowait(Step(epoch=1, seq=seq, slot=0, segments=()))
            with pytest.raises(MailboxFullError):
                log.tell_nowait(Step(epoch=1, seq=9999, slot=0, segments=()))
            for session in pipeline.sessions:
                await system.kill(session)

    run(main)


def test_a_gap_in_the_log_ends_the_epoch() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            pipeline = SimulatedPipeline(system, FakeNetwork(max_delay=0.0), stages=2)
            await pipeline.open()
            pipeline.write(Step(epoch=1, seq=0, slot=0, segments=()))
            pipeline.write(Step(epoch=1, seq=2, slot=0, segments=()))
            await asyncio.sleep(1)
            gaps = [str(failure) for failure in pipeline.failures if "log entry" in str(failure)]
            assert gaps == ["log entry 2 came, expected 1"] * 2
            for session in pipeline.sessions:
                await system.kill(session)

    run(main)


def test_envelopes_of_an_old_epoch_are_counted_and_never_applied() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            pipeline = SimulatedPipeline(system, FakeNetwork(max_delay=0.0), stages=2)
            await pipeline.open()
            pipeline.write(Step(epoch=0, seq=0, slot=0, segments=()))
            await asyncio.sleep(1)
            assert [switch.dead_letters for switch in pipeline.switches] == [1, 1]
            assert [host.steps for host in pipeline.hosts] == [[], []]
            for session in pipeline.sessions:
                await system.kill(session)

    run(main)


def test_a_lost_log_is_reported_as_a_deadlock_with_who_waits_for_what() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            pipeline = SimulatedPipeline(system, FakeNetwork(max_delay=0.01), stages=2)
            await pipeline.open()
            pipeline.log_links[1].cut = True
            answer = pipeline.submit(prompt(64), 1)
            await answer.done.wait()

    with pytest.raises(DeadlockError) as raised:
        run(main)
    assert "stage-1" in str(raised.value)
    assert "log" in str(raised.value)


def test_the_watchdog_fails_every_request_when_no_output_comes() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            network = FakeNetwork(max_delay=0.01)
            pipeline = SimulatedPipeline(system, network, stages=2, running=2, watchdog_s=5.0)
            await pipeline.open()
            network.links["outputs"].cut = True
            answers = [pipeline.submit(prompt(100, i), 5) for i in range(4)]
            await asyncio.sleep(6)
            for answer in answers:
                assert isinstance(answer.end, StageFailedError)
                assert "no output for 5 s" in str(answer.end)
            assert len(pipeline.failures) == 1
            late = pipeline.submit(prompt(10), 1)
            await late.done.wait()
            assert isinstance(late.end, StageFailedError)
            for session in pipeline.sessions:
                await system.kill(session)

    run(main)


def test_requests_that_were_just_submitted_get_an_answer_when_the_coordinator_ends() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            pipeline = SimulatedPipeline(system, FakeNetwork(max_delay=0.01), stages=2, running=1)
            await pipeline.open()
            answers = [pipeline.submit(prompt(100), 5) for _ in range(2)]
            await asyncio.sleep(0.1)
            answers.append(pipeline.submit(prompt(10), 1))
            pipeline.coordinator[Coordinator.control].tell_nowait(Close())
            await system.stop(pipeline.coordinator)
            assert [str(answer.end) for answer in answers] == ["the engine is closing"] * 3
            for session in pipeline.sessions:
                await system.kill(session)

    run(main)


@pytest.mark.parametrize("seed", range(8))
def test_aborts_at_random_moments_leave_no_pages(seed: int) -> None:
    async def main() -> None:
        generator = random.Random(seed)
        async with ActorSystem() as system:
            pipeline = SimulatedPipeline(
                system, FakeNetwork(seed, max_delay=0.2), stages=4, depth=generator.randrange(4), running=6, pages=80
            )
            await pipeline.open()
            answers = []
            for i in range(40):
                ids = prompt(generator.randrange(1, 120), i)
                answers.append((ids, pipeline.submit(ids, 6)))
                await asyncio.sleep(generator.random())
                if generator.random() < 0.6:
                    pipeline.abort(generator.choice(answers)[1])
            await pipeline.finish()
            for ids, answer in answers:
                assert answer.end in ("length", "abort")
                assert tuple(answer.ids) == expected_ids(ids, 6)[: len(answer.ids)]
            assert pipeline.scheduler.pool.used_pages == 0
            for session in pipeline.sessions:
                await system.kill(session)

    run(main, seed=seed)


@pytest.mark.parametrize(("link_s", "slots"), [(0.01, 2), (1.0, 3)])
def test_a_decode_slot_more_is_opened_only_where_the_stages_wait_for_slow_links(link_s: float, slots: int) -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            pipeline = SimulatedPipeline(system, FakeNetwork(3, max_delay=link_s), stages=2, chunk=240)
            await pipeline.open()
            prompts = [prompt(20, i) for i in range(12)]
            for _ in range(2):
                answers = [pipeline.submit(ids, 60) for ids in prompts]
                await pipeline.finish()
                steps = [step for step in pipeline.hosts[0].steps if step.segments[0].token is not None]
                assert [step.num_tokens for step in steps[6:20]] == [6] * 14  # of each batch
                assert [step.num_tokens for step in steps[-50:-10]] == [12 // slots] * 40
                pipeline.hosts[0].steps.clear()
                assert [tuple(answer.ids) for answer in answers] == [expected_ids(ids, 60) for ids in prompts]
            for session in pipeline.sessions:
                await system.kill(session)

    run(main)
