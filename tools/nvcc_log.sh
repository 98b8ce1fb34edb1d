#!/bin/sh
# nvcc_log.sh NVCC ARGUMENTS... -o OBJECT ...
# Runs nvcc and keeps what it prints in OBJECT.ptxas (tools/ptxas_report.py reads it, also when nothing
# had to be compiled again). Shows everything but ptxas' notes, which would drown the build's output.
object=
previous=
for argument in "$@"; do
  [ "$previous" = "-o" ] && object=$argument
  previous=$argument
done
[ -n "$object" ] || exec "$@"

"$@" >"$object.ptxas" 2>&1
status=$?
grep -v -e '^ptxas info' -e 'bytes stack frame' "$object.ptxas" >&2
[ $status -eq 0 ] || rm -f "$object.ptxas"
exit $status
