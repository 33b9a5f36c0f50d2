"""Fuzzers of the wire codec and of the ZeroMQ sockets: ``python -m tests.fuzz``."""
