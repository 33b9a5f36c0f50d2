#!/usr/bin/env bash
# Runs every example as its user would, each in a folder of its own. A failing one ends this.
set -euo pipefail
examples=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server"; rm -rf "$work"' EXIT
cd "$work"

for example in "$examples"/0[1-35-9]_*.py; do
  echo "--- $(basename "$example")"
  python "$example"
done

echo "--- 04_zmq_client.py, 09_http_client.py"
mkfifo announcement
actorpp run --stages 2 --json >announcement &
server=$!
read -r line <announcement
address() { python -c 'import json, sys; print(json.loads(sys.argv[1])[sys.argv[2]])' "$line" "$1"; }
python "$examples/04_zmq_client.py" "$(address endpoint)"
echo "--- 11_zmq_stream.py"
python "$examples/11_zmq_stream.py" "$(address endpoint)"
echo "--- 09_http_client.py"
python "$examples/09_http_client.py" "$(address http)"
kill "$server"
wait "$server" || [ $? -eq 143 ]
server=

echo "--- long_text.py"
python "$examples/long_text.py" LONG.txt
