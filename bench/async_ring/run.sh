#!/bin/bash
# The table of bench/async_ring/README.md on the GPUs that are there: some two minutes. Builds
# nothing.
#
#   bench/async_ring/run.sh [FOLDER] [--OPTION…]      options: those of the program, see --help
#
# FOLDER (default: $OUT, else ./async-ring-results) gets async-ring.json with all figures,
# async-ring-timeline.json, and async-ring.log. bench/async_ring/report.py makes pictures of them.
#
#   ASYNC_RING     the program; default: async_ring in build/cuda/gpu. libunjam.so.0 and
#                  libunjam_cuda.so lie one folder above it.
#   NCCL           libnccl.so.2; default: that of torch's wheel, else as the loader finds it.
#   UNJAM_COMMIT   what is measured, where git cannot say it: in a copy without .git.
#   SECONDS_MOST   after so many seconds it counts as hung; default 290.
set -u
case ${1:-} in
  -h)
    sed -n '2,15s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac
root=$(cd "$(dirname "$0")/../.." && pwd)
out=${OUT:-async-ring-results}
if [ $# -gt 0 ] && [ "${1#--}" = "$1" ]; then
  out=$1
  shift
fi
program=${ASYNC_RING:-$root/build/cuda/gpu/async_ring}
if [ ! -x "$program" ]; then
  echo "run.sh: $program is not there. Build the target gpu_async_ring, or set ASYNC_RING." >&2
  exit 2
fi
mkdir -p "$out" || exit 1

nccl=${NCCL:-}
if [ -z "$nccl" ]; then
  nccl=$(
    python3 - <<'END' 2>/dev/null
import importlib.util
from pathlib import Path

found = importlib.util.find_spec("nvidia")
for folder in (found.submodule_search_locations or ()) if found else ():
    path = Path(folder) / "nccl" / "lib" / "libnccl.so.2"
    if path.is_file():
        print(path)
        break
END
  )
fi
if [ -z "${UNJAM_COMMIT:-}" ]; then
  UNJAM_COMMIT=$(git --no-optional-locks -C "$root" describe --always --dirty --abbrev=7 \
    '--exclude=*' 2>/dev/null || echo unknown)
fi
export UNJAM_COMMIT NCCL_NVLS_ENABLE=0 PYTHONUNBUFFERED=1

{
  echo "commit   $UNJAM_COMMIT"
  echo "program  $program $*"
  echo "nccl     ${nccl:-as the loader finds it}"
  timeout 60 nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>&1 |
    sed 's/^/gpu      /'
} | tee "$out/async-ring.log"

# (An empty value would read as an option without one.)
timeout -k 10 "${SECONDS_MOST:-290}" "$program" ${nccl:+--nccl "$nccl"} \
  --json "$out/async-ring.json" --trace-json "$out/async-ring-timeline.json" "$@" \
  </dev/null 2>&1 | tee -a "$out/async-ring.log"
code=${PIPESTATUS[0]}
[ "$code" = 0 ] || echo "async_ring ended with $code (1: failed or wrong, 2 and 124: hung)" |
  tee -a "$out/async-ring.log"
exit "$code"
