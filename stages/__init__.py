"""placeholder"""

if __name__ != "actorpp.stages":
    raise ImportError("import actorpp.stages, not stages")
