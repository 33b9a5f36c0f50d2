"""What the coordinator and the stages say to each other comes through the sockets' codecs as it went in."""

from __future__ import annotations

import pytest

from actorpp.errors import ProtocolError
from actorpp.stages.codecs import Sender, driver_to_stage, stage_to_driver
from actorpp.stages.messages import Admit, Logprobs, Output, SamplingParams, Segment

PARAMS = SamplingParams(
    temperature=0.5,
    presence_penalty=-1.0,
    logit_bias=((3, -100.0), (2**31 - 1, 1.5)),
    min_tokens=4,
    end_ids=(2, 7),
    logprobs=0,
    prompt_logprobs=20,
    seed=2**63 - 1,
)
ROWS = Logprobs(top=1, ids=b"\0" * 16, values=b"\1" * 16, ranks=b"\2" * 8)


def test_sampling_parameters_and_log_probabilities_travel() -> None:
    admit = Admit(epoch=1, seq=2, rid=3, prompt_len=1, sampling=PARAMS, pages=(5,), tokens=b"\0\0\0\0")
    to_stage, to_driver, sender = driver_to_stage(), stage_to_driver(), Sender("x")
    frames = [bytes(frame) for frame in to_stage.encode(admit, sender)]
    assert to_stage.decode(frames).message == admit
    output = Output(epoch=1, seq=2, ids=(5,), logprobs={3: ROWS}, prompt_logprobs={3: ROWS, 2**40: ROWS})
    frames = [bytes(frame) for frame in to_driver.encode(output, sender)]
    assert to_driver.decode(frames).message == output
    assert ROWS.rows == 2
    with pytest.raises(ProtocolError, match="body"):
        to_stage.decode(frames)


def test_rows_of_prompt_log_probabilities_end_before_the_first_output_token() -> None:
    """Of a prompt of 10 tokens: positions 0 to 8 give the tokens 1 to 9, and position 9 the output's first."""
    for start, length, rows in ((0, 4, range(4)), (4, 6, range(4, 9)), (0, 10, range(9)), (8, 9, range(8, 9))):
        assert Segment(1, start, length).prompt_logprob_rows(10) == rows
    for start in (9, 10, 30):
        assert not Segment(1, start, 1).prompt_logprob_rows(10)
