#!/usr/bin/env bash
# bash run.sh [ARGUMENTS]   sets up what is missing and trains; the arguments are train.py's
# bash run.sh test [ARGS]   sets up what is missing, then ruff and all tests; ARGS are pytest's
#                           -m quick: no test that starts a process or trains through train.py
# bash run.sh failures      the published failures: as they happened, guarded, cured
# bash run.sh bench         what safety costs and what it buys, half an hour on two cores
# bash run.sh pack [FILE]   the folder autopsy/ as one file, autopsy.pyz: python autopsy.pyz SCRIPT
# bash run.sh gpu STAGE     accuracy, costs, correctness: one call each, at most 570 seconds on a GPU;
#                           a stage that was cut short goes on where it was. The first one wants
#                           --airbench CLONE --hiverge CLONE --data-dir CIFAR10
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

die() {
  echo "run.sh: $1" >&2
  exit 2
}

# can PYTHON MODULES: is it 3.10 or newer, is its torch new enough, do the modules import?
# Leaves in $gpus how many GPUs torch sees.
can() {
  gpus=$("$1" -c "
import sys; assert sys.version_info >= (3, 10)
import torch, torchvision, tqdm, $2
assert tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 9)
print(torch.cuda.device_count())" 2>/dev/null)
}

# set_up MODULES REQUIREMENTS: leaves in $python the first Python that has all modules; makes
# .venv when none has.
set_up() {
  for python in "${PYTHON:-python3}" "$here/.venv/bin/python"; do
    can "$python" "$1" && return
  done
  local base=${PYTHON:-python3}
  "$base" -c 'import sys; assert sys.version_info >= (3, 10)' 2>/dev/null ||
    die "needs Python 3.10 or newer; '$base' is not (set PYTHON=/path/to/python3.10)"
  echo "run.sh: setting up $here/.venv (once; torch is a download of 1 GB, with CUDA 3 GB and" \
    "5 GB on disk; without a GPU this is smaller: pip install torch torchvision" \
    "--index-url https://download.pytorch.org/whl/cpu)" >&2
  # --system-site-packages: a torch that is already there is used, not downloaded again
  [[ -x $here/.venv/bin/python ]] || "$base" -m venv --system-site-packages "$here/.venv" ||
    die "'$base -m venv' failed; on Debian and Ubuntu: apt install python3-venv"
  python=$here/.venv/bin/python
  "$python" -m pip install --quiet --disable-pip-version-check -r "$here/$2"
  can "$python" "$1" ||
    die "$2 is installed but does not import; delete $here/.venv and try again"
}

case ${1:-} in
  test)
    shift
    set_up "pytest, xdist, ruff, matplotlib" requirements-dev.txt
    cd "$here"
    "$python" -m ruff check .
    "$python" -m ruff format --check . ||
      die "run '$python -m ruff format .', with the ruff of requirements-dev.txt"
    # a process of one thread on each core; with -n 0 at the end all runs in this one, as a
    # debugger needs it
    export OMP_NUM_THREADS=1
    exec "$python" -m pytest -q -n auto --maxprocesses 4 --max-worker-restart 0 --dist loadgroup "$@"
    ;;
  failures)
    set_up tqdm requirements.txt
    exec "$python" "$here/failures/run_all.py"
    ;;
  bench)
    set_up tqdm requirements.txt
    for bench in guard_cost precision_ladder optim_step save_stall scan odd_runs; do
      "$python" "$here/bench/$bench.py"
    done
    "$python" "$here/bench/kill_resume.py" --kills 25  # a hundred without the number
    ;;
  pack)
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    (cd "$here" && find autopsy -name "*.py" -exec cp --parents {} "$folder" \;)
    # zipapp's own -m would lose the exit code
    printf 'import sys\nfrom autopsy.watch.script import main\nsys.exit(main())\n' >"$folder/__main__.py"
    # without entries for folders, which nobody reads
    "${PYTHON:-python3}" -c 'import sys, zipapp
zipapp.create_archive(*sys.argv[1:], filter=lambda path: path.suffix == ".py", compressed=True)' \
      "$folder" "${2:-$here/autopsy.pyz}"
    ;;
  gpu)
    shift
    set_up "pytest, matplotlib" requirements-dev.txt
    ((gpus)) || die "gpu needs a CUDA device, and torch sees none here"
    exec "$python" "$here/bench/gpu.py" "$@"
    ;;
  *)
    set_up tqdm requirements.txt
    if ((gpus > 1)); then
      exec "$python" -m torch.distributed.run --standalone --nproc_per_node="$gpus" \
        "$here/train.py" "$@"
    fi
    exec "$python" "$here/train.py" "$@"
    ;;
esac
