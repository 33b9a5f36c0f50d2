"""What headers may announce, and the small tools of all tensor links."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actorpp.errors import ConfigError, ProtocolError
from actorpp.transport.gloo import message_tag
from actorpp.transport.rendezvous import host_store, open_store
from actorpp.transport.streams import NullStreams, streams_for
from actorpp.transport.tensors import DTYPES, dtype_name, parse_header


@pytest.fixture(scope="module", autouse=True)
def _signal_pipe_of_libuv() -> None:
    """The first store of a process opens a pipe that stays; no test is to be blamed for it."""
    host_store()


@pytest.mark.parametrize("name", DTYPES)
def test_headers_that_agree(name: str) -> None:
    tensor = torch.zeros(3, 5, dtype=DTYPES[name])
    assert parse_header([3, 5], name, tensor.nbytes) == ((3, 5), tensor.dtype)
    assert dtype_name(tensor.dtype) == name
    assert parse_header([], name, tensor.itemsize) == ((), tensor.dtype)


@pytest.mark.parametrize(
    ("shape", "dtype", "nbytes", "reason"),
    [
        ([3], "float64", 24, "unknown dtype 'float64'"),
        ([3], "", 12, "unknown dtype ''"),
        ([3], "float32", 11, "says 11 bytes, but \\(3,\\) of float32 has 12"),
        ([-3], "float32", -12, "negative size"),
        ([-3, -1], "float32", 12, "negative size"),
        ([1 << 40, 1 << 40], "float32", 1 << 82, "over the limit"),
    ],
)
def test_headers_that_do_not(shape: list[int], dtype: str, nbytes: int, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        parse_header(shape, dtype, nbytes)


@given(st.integers(0, 2**40), st.integers(0, 2**34), st.integers(1, 127))
def test_tags_fit_and_tell_apart_what_is_under_way(index: int, nbytes: int, ahead: int) -> None:
    assert 0 <= message_tag(index, nbytes) < 2**31
    assert message_tag(index, nbytes) != message_tag(index + ahead, nbytes)


def test_tags_tell_lengths_apart() -> None:
    lengths = [rows * width * size for width in (64, 576, 4096) for size in (2, 4) for rows in range(1, 2049)]
    assert len({message_tag(0, nbytes) for nbytes in set(lengths)}) > len(set(lengths)) * 0.999


def test_on_a_cpu_streams_have_nothing_to_do() -> None:
    streams = streams_for(torch.device("cpu"))
    assert isinstance(streams, NullStreams)
    tensor = torch.ones(2)
    assert streams.to_host(tensor, streams.mark()) is tensor
    assert streams.to_device(tensor) is tensor
    buffer = streams.host_buffer([2, 3], torch.float16)
    assert (buffer.shape, buffer.dtype) == ((2, 3), torch.float16)


@pytest.mark.parametrize(
    "url", ["", "store", "file://host/path", "http://127.0.0.1:80", "tcp://127.0.0.1", "tcp://127.0.0.1:x"]
)
def test_rendezvous_urls_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match=r"rendezvous is file:///path or tcp://host:port|Port could not be cast"):
        open_store(url, 1, 1.0)


def test_a_hosted_store_listens_where_it_was_told() -> None:
    store, url = host_store()
    assert url.startswith("tcp://127.0.0.1:")
    client = open_store(url, 1, 5.0)
    client.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_store_open_to_other_machines_takes_a_permission(host: str) -> None:
    with pytest.raises(ConfigError, match="no authentication"):
        host_store(host)
