"""How bytes move: typed frames over ZeroMQ, tensors over point-to-point links, stage processes on this host.

Nothing here knows of steps or models. Import the submodules directly; this one stays empty, and neither it nor
``wire``, ``sockets``, ``addresses`` and ``process`` import torch.
"""

if __name__ != "actorpp.transport":
    raise ImportError("import actorpp.transport, not transport")
