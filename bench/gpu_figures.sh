#!/bin/bash
# The figures of lab/benchmarks.md, "Beside NCCL", on the GPUs that are there: some minutes for all,
# each part with a time limit. Builds nothing: `python3 -m unjam` and NCCL must be at hand.
#
#   bench/gpu_figures.sh FOLDER [RANKS] [PART…]      parts, none: all
#
#   device  all sizes in a stream            large  the large ones, more calls
#   short   the short ones, 1,000 calls      bf16   all-reduces of bf16 in a stream
#   async   beside streams                   host   one call at a time
#   heap    buffers in unjam's heap          gemm   a matrix product beside all-reduces
#
# Into FOLDER: PART.json, as `unjam bench --json` writes it, and PART.log. Ends with a failure if a
# part does. UNJAM_COMMIT says what is measured where git cannot: in a copy without .git.
set -u
if [ $# = 0 ]; then
  sed -n '2,13s/^# \{0,1\}//p' "$0"
  exit 2
fi
out=$1
ranks=${2:-$(nvidia-smi --list-gpus | wc -l)}
shift $(($# > 1 ? 2 : 1))
mkdir -p "$out" || exit 1
export NCCL_NVLS_ENABLE=0 PYTHONUNBUFFERED=1

# name | seconds | options
parts=$(
  cat <<END
device|200|--modes device --kinds all --seconds 0.02 --sizes 1K,8K,64K,128K,256K,512K,1M,2M,4M,8M,16M,64M,256M,1G
large|150|--modes device --kinds all --seconds 0.3 --sizes 64M,256M,1G
short|150|--modes device --kinds all --seconds 0.3 --sizes 1K,8K,16K,32K,64K,1M
bf16|120|--modes device --kinds all_reduce --dtype bf16 --seconds 0.3 --sizes 1K,64K,1M,64M,1G
async|300|--modes async --kinds all --seconds 0.4 --sizes 1K,64K,256K,1M,2M,4M,8M,25M,64M,256M,1G
host|240|--modes host --kinds all --seconds 0.04 --sizes 1K,64K,1M,8M,64M,1G
heap|120|--modes device --kinds all_reduce,all_gather,broadcast --seconds 0.02 --sizes 64M,1G --heap
gemm|240|--gemm --lanes 8,16,24,32
END
)

worst=0
while IFS='|' read -r name limit options; do
  if [ $# != 0 ]; then
    case " $* " in *" $name "*) ;; *) continue ;; esac
  fi
  echo "==== $name: unjam bench --device cuda --ranks $ranks --peer nccl $options ===="
  # shellcheck disable=SC2086
  timeout -k 10 "$limit" python3 -m unjam bench --device cuda --ranks "$ranks" --peer nccl $options \
    --json "$out/$name.json" </dev/null 2>&1 | tee "$out/$name.log"
  code=${PIPESTATUS[0]}
  [ "$code" = 0 ] || worst=1
  [ "$code" = 0 ] || echo "$name failed: $code (124: it took longer than $limit s)"
done <<<"$parts"
exit $worst
