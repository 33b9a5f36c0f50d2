"""A child of ChildProcess. What it does after it has taken care of its parent's death is the first argument."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

from actorpp.transport import process
from actorpp.transport.process import leave_with_parent

how = sys.argv[1]
if how == "thread-only":

    def refuse(fd: int) -> None:
        raise OSError("no such signal here")

    process.kill_at_eof = refuse
leave_with_parent()
if how == "lines":
    print("first")
    sys.stderr.write("second\n")
    sys.stdout.write("é" * 20_000 + "\n")
    os.write(1, b"\xff\xfe broken\r\n")
    sys.stdout.write("no line end")
elif how == "exit":
    sys.exit(int(sys.argv[2]))
elif how == "environment":
    print("variable", os.environ["FROM_DRIVER"])
    print("group", os.getpgrp() == os.getpid())
    print("stdin", repr(sys.stdin.read()))
    print("descriptors", sorted(int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) > 2))
    print("liveness", os.environ["ACTORPP_LIVENESS_FD"])
elif how == "sigint":
    os.kill(os.getpid(), signal.SIGINT)
    print("still here")
else:
    print("ready", os.getpid(), flush=True)
    if how == "hold-gil":
        ctypes.PyDLL(None).pause()
    elif how == "ignore-term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ignoring", flush=True)
    threading.Event().wait()
