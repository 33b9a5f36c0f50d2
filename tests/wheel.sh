#!/usr/bin/env bash
# Builds the wheel from an sdist and checks that it holds every module of the four folders, and works from elsewhere.
# usage: tests/wheel.sh FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
out=$1

pip wheel --quiet --no-deps --wheel-dir "$out/wheel" .
python - "$out"/wheel/actorpp-*.whl <<'PYTHON'
import sys
import zipfile
from pathlib import Path

packed = {name for name in zipfile.ZipFile(sys.argv[1]).namelist() if name.endswith((".py", ".html", ".css", ".js"))}
own = {f"actorpp/{p.relative_to('actorpp')}" for kind in ("py", "html", "css", "js") for p in Path("actorpp").rglob(f"*.{kind}")}
for folder in ("stages", "transport", "cli"):
    own |= {f"actorpp/{p}" for p in Path(folder).rglob("*.py")}
if packed != own:
    sys.exit(f"the wheel lacks {sorted(own - packed)} and has {sorted(packed - own)} besides")
print(f"the wheel holds all {len(own)} modules")
PYTHON
