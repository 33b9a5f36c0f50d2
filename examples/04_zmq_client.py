"""Asks a running ``actorpp run`` for a completion, with pyzmq and msgpack alone: python 04_zmq_client.py tcp://…"""

import sys
import uuid

import msgpack
import zmq

address, prompt = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "The capital of France is"

with zmq.Context() as context, context.socket(zmq.REQ) as socket:
    socket.connect(address)
    header = {"id": uuid.uuid4().hex, "op": "generate"}  # the same id again asks for the same answer
    body = {"prompt": prompt, "max_tokens": 64}
    socket.send_multipart([b"ACTORPP1", msgpack.packb(header), msgpack.packb(body)])
    _, reply, result, *_ = socket.recv_multipart()
    if msgpack.unpackb(reply)["status"] == "error":
        sys.exit(msgpack.unpackb(result)["message"])
    print(prompt + msgpack.unpackb(result)["text"])
