"""``python -m actorpp.cli`` is ``actorpp``."""

from actorpp.cli.main import main

if __name__ == "__main__":
    main()
