"""placeholder"""

if __name__ != "actorpp.cli":
    raise ImportError("import actorpp.cli, not cli")
