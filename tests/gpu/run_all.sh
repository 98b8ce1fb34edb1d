#!/bin/bash
# Runs the GPU tests that lie beside this script (build/<preset>/gpu), each with a time limit, and ends
# with a table. Builds nothing.
#
#   run_all.sh [--quick] [NAME…]      names: see `runs` below; none: all
#
# The device library is looked for beside libunjam.so, one folder above. Into $OUT (default: ./gpu-results):
# summary.txt, gpu_tests.log (all output), and NAME.csv of each run that prints such lines (price, matrix*).
# Both begin with what was run, and where; UNJAM_COMMIT says what is tested where git cannot: in a copy
# without .git.
set -u
bin=${GPU_TESTS:-$(cd "$(dirname "$0")" && pwd)}
out=${OUT:-gpu-results}
mkdir -p "$out"
log=$out/gpu_tests.log
summary=$out/summary.txt

commit() {
  [ -n "${UNJAM_COMMIT:-}" ] && echo "$UNJAM_COMMIT" && return
  # As in `unjam bench --json`: "-dirty" if tracked files differ, and of no other repository.
  local root
  root=$(git -C "$bin" rev-parse --show-toplevel 2>/dev/null) && [ -f "$root/include/unjam/unjam.h" ] &&
    git --no-optional-locks -C "$root" describe --always --dirty --abbrev=7 '--exclude=*' 2>/dev/null ||
    echo unknown
}

# GPUs that are alike are one line.
gpus() {
  command -v nvidia-smi >/dev/null || { echo 'no nvidia-smi' && return; }
  local told
  told=$(timeout 60 nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>&1) ||
    told="nvidia-smi fails: $told"
  echo "$told" | uniq -c | sed 's/^ *//; 2,$s/^/           /'
}

cpu() {
  local model
  model=$(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo 2>/dev/null | head -n 1)
  echo "${model:-$(uname -m)}, $(env -u OMP_NUM_THREADS nproc) cores"
}

# What is set of what changes the runs.
settings() {
  env | grep -E '^(SEED|SOAK_SECONDS|GPU_TESTS|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_MAX_CONNECTIONS|UNJAM_[A-Z0-9_]*)=' |
    grep -v '^UNJAM_COMMIT=' | sort | tr '\n' ' '
}

{
  echo "date       $(date -u '+%Y-%m-%d %H:%M:%S UTC')"
  echo "command    $(settings)$0 $*"
  echo "commit     $(commit)"
  echo "GPUs       $(gpus)"
  echo "CPU        $(cpu)"
  echo
} | tee "$log" >"$summary"

quick=0
if [ "${1:-}" = --quick ]; then
  quick=1
  shift
fi
if [ $quick = 1 ]; then
  matrix="--repeats 5 --lazy-repeats 3" soak=10 programs="--iterations 100 --seeds 3" kill="--rounds 5"
  price="--repeats 200 --large-repeats 10 --rounds 5"
else
  matrix="" soak=${SOAK_SECONDS:-120} programs="" kill="" price=""
fi
seed=${SEED:-1}

# name | seconds | environment | command
runs=$(
  cat <<END
leaves|120||leaf_check
lines|240||torn_lines --seconds 0.2
smoke|200||smoke
smoke-alone|100||smoke --ranks 1
smoke-72|200|UNJAM_GUARANTEED_SLOT_BYTES=8192 UNJAM_POOL_SLOTS=0 UNJAM_MAX_ACTIVE_KEYS=16|smoke --ranks 72 --order 0 --most 5000 --repeats 1
long-packets|120||long_packets
smoke-behind|200|UNJAM_LINES=1 UNJAM_WHOLE_LINES=0|smoke
trees|200|UNJAM_ALGORITHM=double_binary_tree|smoke --ranks 4
trees-two|200|UNJAM_ALGORITHM=double_binary_tree|smoke --ranks 2
trees-programs|580|UNJAM_ALGORITHM=double_binary_tree|programs --ranks 4 $programs
trees-kill|580|UNJAM_ALGORITHM=double_binary_tree|kill --ranks 4 $kill
in-stream|420||in_stream
written|240||written
pairs|240||pairs
meet|200||meet
meet-sixteen|200||meet --ranks 16 --rounds 4
matrix|260|-u CUDA_DEVICE_MAX_CONNECTIONS|sync_matrix $matrix
matrix-1|260|CUDA_DEVICE_MAX_CONNECTIONS=1|sync_matrix $matrix
matrix-32|260|CUDA_DEVICE_MAX_CONNECTIONS=32|sync_matrix $matrix
matrix-blocking|260||sync_matrix --blocking-streams $matrix
matrix-slices|260|UNJAM_IN_STREAM=0|sync_matrix --only large $matrix
circles|560||circles
programs|580||programs $programs
programs-processes|580||programs --processes $programs
programs-mixed|580||programs --ranks-per-process 2 $programs
programs-async|580||programs --async $programs
registered|300||registered
registered-slices|300||registered --slices
registered-processes|300||registered --processes
kill|580||kill $kill
kill-registered|580||kill --registered $kill
kill-registered-slices|580|UNJAM_IN_STREAM=0|kill --registered $kill
cancelled|120||cancelled
nearly-full|120||nearly_full
sent-away|120||sent_away
price|320||price $price
calls|120||calls
calls-late|120||calls --ranks 4 --late 2000 --calls 200 --rounds 4 --least 8192 --most 600000 --engine-share 0.05
calls-late-large|120||calls --ranks 4 --late 1000 --calls 100 --rounds 4 --kind all_reduce --least 1073741824 --most 1073741824 --engine-share 0.004
back-to-back|120||back_to_back
reshard|120||reshard
reshard-4|120||reshard --ranks 4
back-to-back-apart|120|UNJAM_IN_STREAM_OVERLAP=0|back_to_back
burst|120||burst --keys 32 --bytes 8388608 --shuffle --rounds 40
burst-25|120||burst --keys 32 --bytes 26214400 --shuffle --rounds 20
soak|$((soak + 260))||soak --seconds $soak
soak-apart|$((soak + 260))|UNJAM_IN_STREAM_OVERLAP=0|soak --seconds $soak
soak-processes|$((soak + 260))||soak --processes --seconds $soak
soak-mixed|$((soak + 260))||soak --ranks-per-process 2 --seconds $soak
soak-disturbed|$((soak + 260))||soak --ranks-per-process 2 --disturb 8 --seconds $soak
soak-keys|$((soak + 260))||soak --keys 100 --least 2e6 --registered --seconds $soak
soak-keys-processes|$((soak + 260))||soak --processes --keys 100 --least 2e6 --registered --seconds $soak
soak-small-slots|$((soak + 260))|UNJAM_GUARANTEED_SLOT_BYTES=4096 UNJAM_IN_STREAM_PATIENCE_US=20|soak --seconds $soak
soak-keys-3|$((soak + 260))||soak --processes --ranks 3 --keys 100 --least 2e6 --seconds $soak
END
)

wanted() {
  [ $# = 1 ] && return 0
  local name=$1 n
  shift
  for n in "$@"; do [ "$n" = "$name" ] && return 0; done
  return 1
}

printf '%-20s %-6s %4s %9s\n' run result code time >>"$summary"
ran=0 worst=0
while IFS='|' read -r name limit environment command; do
  wanted "$name" "$@" || continue
  echo "==== $name: ${environment:+env $environment }$command --seed $seed ====" | tee -a "$log"
  begin=$(date +%s.%N)
  # shellcheck disable=SC2086
  timeout -k 10 "$limit" env $environment "$bin"/$command --seed "$seed" </dev/null >"$out/.run" 2>&1
  code=$?
  seconds=$(echo "$(date +%s.%N) $begin" | awk '{printf "%.1f", $1 - $2}')
  cat "$out/.run" >>"$log"
  grep -v '^csv,' "$out/.run" | tail -n 60
  rm -f "$out/$name.csv"  # of an earlier call
  grep -q '^csv,' "$out/.run" && sed -n 's/^csv,//p' "$out/.run" >"$out/$name.csv"
  rm -f "$out/.run"
  case $code in
    0) verdict=PASS ;;
    2 | 124 | 137) verdict=HUNG ;;
    *) verdict=FAIL ;;
  esac
  [ $code = 0 ] || worst=1
  # At once: who ends this script early has what was done.
  printf '%-20s %-6s %4d %9s s\n' "$name" "$verdict" "$code" "$seconds" >>"$summary"
  ran=1
done <<<"$runs"

[ $ran = 1 ] || echo 'nothing was run' >>"$summary"
cat "$summary"
exit $worst
