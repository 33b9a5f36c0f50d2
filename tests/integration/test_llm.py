"""``LLM`` with stage processes: its answers, several at once, and that nothing is left, whatever way it ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from actorpp import LLM, SamplingParams
from actorpp.errors import StageFailedError
from actorpp.transport.sockets import close_context
from tests.support.cli import gone, running

pytestmark = pytest.mark.slow

END_S = 5.0
PROMPTS = [[1 + (7 * i * i + n) % 511 for i in range(n)] for n in (1, 5, 700, 33)]


@pytest.fixture(autouse=True)
def _end_of_context() -> Iterator[None]:
    """The ZeroMQ context lives as long as its process; here each test is to leave nothing behind."""
    yield
    close_context()


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_two_at_once_each_with_its_own_stages_and_end(small_model: Path) -> None:
    """The same answers from one stage and from two; a stage that is killed fails its own LLM alone."""
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, seed=4)
    options: dict[str, Any] = {"load_format": "dummy", "threads_per_stage": 1, "use_tqdm_on_load": False}
    answers: dict[int, list[list[int]]] = {}
    before = children()

    def ask(number: int, llm: LLM) -> None:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        answers[number] = [output.outputs[0].token_ids for output in outputs]

    with LLM(small_model, stages=2, max_restarts=0, **options) as one, LLM(small_model, **options) as other:
        assert len(children() - before) == 3
        assert one.model_path == small_model
        threads = [threading.Thread(target=ask, args=pair) for pair in enumerate((one, other))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for llm in (one, other):
            assert (llm.stats().requests_finished, llm.stats().pages_used) == (len(PROMPTS), 0)
        psutil.Process(one.stats().stages[1].pid).kill()
        for _ in range(2):
            with pytest.raises(StageFailedError, match="stage"):
                one.generate([1, 2, 3], SamplingParams(max_tokens=16000, ignore_eos=True))
        ask(2, other)
    assert answers[0] == answers[1] == answers[2]
    assert all(len(ids) == 12 for ids in answers[0])
    assert children() == before


# --- programs that end without close ---


def script(model: Path, then: str, **options: object) -> str:
    return f"""
import sys
from actorpp import LLM, SamplingParams
llm = LLM({str(model)!r}, load_format="dummy", stages=2, **{options})
{then}
"""


def test_ctrl_c_in_generate_ends_the_program_and_its_stages(environment: dict[str, str], small_model: Path) -> None:
    then = "print('now', flush=True); llm.generate([[1]] * 4, SamplingParams(max_tokens=16000, ignore_eos=True))"
    with running(script(small_model, then), environment=environment, program=["-c"]) as command:
        command.wait_for("now")
        family = command.family()
        assert len(family) == 3
        command.interrupt()
        assert command.finish(END_S) == -signal.SIGINT
        assert gone(family, END_S) == []
    assert command.stderr.rstrip().endswith("KeyboardInterrupt")
    assert list(Path(environment["TMPDIR"]).glob("actorpp*")) == []


def test_a_program_that_never_closes_ends(environment: dict[str, str], small_model: Path) -> None:
    """With its stages in this process: their compute threads must not hold up the end."""
    then = "print(len(llm.generate([[1, 2], [3]])), 'torch' in sys.modules)"
    program = script(small_model, then, transport="inproc")
    with running(program, environment=environment, program=["-c"]) as command:
        assert command.finish() == 0
    assert command.stdout == "2 True\n"
    assert command.stderr.endswith("generating: 2 of 2 prompts\n")
