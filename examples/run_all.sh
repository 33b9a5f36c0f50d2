#!/usr/bin/env bash
# Runs every example as its user would, each in a folder of its own, two at a time; clients share a server. Ends with an
# error if one fails.
set -euo pipefail
examples=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export examples work

CLIENTS="04_zmq_client 09_http_client 11_zmq_stream"
export CLIENTS

alone() {  # name: runs the example, or the clients, and prints all that was said in one piece
  local status=0
  mkdir "$work/$1"
  cd "$work/$1"
  case $1 in
    clients) clients ;;
    long_text) python "$examples/long_text.py" LONG.txt ;;
    *) python "$examples/$1.py" ;;
  esac >output 2>&1 || status=$?
  printf -- '--- %s\n%s\n' "$1" "$(cat output)"
  return $status
}

clients() {  # every client in turn, against one server of two stages
  local server line name status=0
  mkfifo announcement
  actorpp run --stages 2 --json >announcement &
  server=$!
  read -r line <announcement || return 1
  for name in $CLIENTS; do
    echo "- $name"
    case $name in
      *http*) python "$examples/$name.py" "$(address http)" ;;
      *) python "$examples/$name.py" "$(address endpoint)" ;;
    esac || status=1
  done
  kill "$server"
  wait "$server" || [ $? -eq 143 ] || status=1
  return $status
}

address() {  # door: where the server says that it is
  python -c 'import json, sys; print(json.loads(sys.argv[1])[sys.argv[2]])' "$line" "$1"
}
export -f alone clients address

{
  echo clients
  for example in "$examples"/*.py; do
    name=$(basename "$example" .py)
    case " $CLIENTS " in *" $name "*) ;; *) echo "$name" ;; esac
  done
} | xargs -P 2 -I '{}' bash -euo pipefail -c 'alone "{}"'
