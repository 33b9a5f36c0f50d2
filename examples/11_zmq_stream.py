"""Streams a completion from ``actorpp run`` with pyzmq and msgpack alone: python 11_zmq_stream.py tcp://… [prompt]

A DEALER may get many replies to one message: as many as it gives credit for, and it gives more as it takes them.
"""

import sys
import uuid
from typing import Any

import msgpack
import zmq

CREDIT = 16

address, prompt = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "Once upon a time"
request = uuid.uuid4().hex


def send(socket: zmq.Socket[bytes], header: dict[str, Any], body: dict[str, Any]) -> None:
    socket.send_multipart([b"", b"ACTORPP1", msgpack.packb(header), msgpack.packb(body)])


with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
    socket.linger = 0
    socket.connect(address)
    body = {"prompt": prompt, "max_tokens": 64, "progress": True}
    send(socket, {"id": request, "op": "generate", "credit": CREDIT}, body)
    print(prompt, end="", flush=True)
    taken = 0
    status = "more"
    while status == "more":
        _, _, reply, content, *_ = socket.recv_multipart()
        header, body = msgpack.unpackb(reply), msgpack.unpackb(content)
        if header["id"] != request:
            continue  # the answer to a message that gave credit
        status = header["status"]
        if status == "error":
            sys.exit(f"\n{body['code']}: {body['message']}")
        print(body["text"], end="", flush=True)
        taken += 1
        if taken % (CREDIT // 2) == 0:
            send(socket, {"id": uuid.uuid4().hex, "op": "credit", "credit": CREDIT // 2}, {"request": request})
    metrics = body["metrics"]
    print(f"\n{body['prompt_tokens']} prompt tokens, first token after {metrics['ttft_s']:.2f} s", file=sys.stderr)
