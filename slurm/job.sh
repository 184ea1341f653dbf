# shellcheck shell=bash disable=SC2034,SC2154 # variables come from the script that sources this, and go there
# What the job scripts of this folder have in common. Each sets $root and $script, its own name, and sources this file:
# the site's settings, Python, cores, and how an attempt ends.

say() { echo "$script: $*"; }
code=2 # of this script's own errors; then what srun returns
fail() { say "error: $*" >&2; exit "$code"; }

# Of whoever submits from within another job: sbatch hands on to which cores that one was bound, and srun obeys.
unset "${!SLURM_CPU_BIND@}"
# Of a shell in which another launcher has started ranks: by RANK each rank would take itself for that one.
[[ -z "${RANK:-}" ]] || unset MASTER_ADDR MASTER_PORT
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE GROUP_RANK GROUP_WORLD_SIZE \
    ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE
unset "${!TORCHELASTIC_@}"
# Steps would take over an `--export=NONE` of the job, and miss what is set below.
export SLURM_EXPORT_ENV=ALL

# shellcheck source=slurm/cluster.env
source "$root/slurm/cluster.env"
# Only from here, since `module` trips over unset variables. No -e: srun's exit code is an answer, not a reason to die.
set -uo pipefail
read -ra srun_options <<< "${PLUMBLINE_SRUN_OPTIONS:-}"
read -ra run <<< "${PLUMBLINE_RUN:-}"
python="${PLUMBLINE_PYTHON:-$root/.venv/bin/python}"
# What starts a rank, ahead of the name of a program of launcher/. In a container Python's path is none of the host's.
launch=("${run[@]}" "$python")
[[ ${#srun_options[@]} -gt 0 || ${#run[@]} -gt 0 ]] || command -v "$python" > /dev/null ||
    fail "cannot execute $python on $SLURMD_NODENAME: make the environment, or set PLUMBLINE_PYTHON in" \
        "slurm/cluster.env; if other nodes have it, submit with --exclude=$SLURMD_NODENAME"
export PYTHONUNBUFFERED=1 # a log line appears when it is printed, and is not lost when a rank is killed

# When the time is over: for ranks in containers, which cannot ask, and since older versions of Slurm do not say it.
# Of a task of an array, not of the array: the last of its tasks has the array's number. (A job that was submitted from
# within a task has that task's variables, too, and a number of its own.)
job="$SLURM_JOB_ID"
[[ "${SLURM_ARRAY_JOB_ID:-}" != "$job" ]] || job="${job}_$SLURM_ARRAY_TASK_ID"
if end="$(SLURM_TIME_FORMAT=%s squeue --noheader --jobs="$job" --format=%e)"; then
    [[ "$end" =~ ^[0-9]+$ ]] || end="" # there is no limit
    export SLURM_JOB_END_TIME="$end"
fi

# --- Cores. srun has not inherited --cpus-per-task from sbatch since Slurm 22.05: without this every task, with its
# data workers, is bound to one core. Since 23.11 it is told by --tres-per-task, too, and dies where the two differ.
[[ ! "${SLURM_TRES_PER_TASK:-}" =~ (^|,)cpu[=:]([0-9]+) ]] || export SLURM_CPUS_PER_TASK="${BASH_REMATCH[2]}"
[[ -z "${SLURM_CPUS_PER_TASK:-}" ]] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
# Torch would start one thread per core of the node in each of the node's ranks.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"

restarts="${SLURM_RESTART_COUNT:-0}" # Slurm leaves it unset in the first attempt
requeue() { "${PLUMBLINE_HOST_PYTHON:-$python}" "$root/launcher/requeue.py" "$@"; }

# attempt COMMAND...: run the command, an srun, and end this script. The job goes back into the queue, or does not.
# $work has the arguments by which requeue.py knows what the job works on, $before how much of it was saved before.
attempt() {
    "$@" &
    local step=$!
    # Ranks that hang hear no notice, and the time limit ends this shell, too, by SIGTERM and KillWait later for good.
    # Hence the background: a trap is run between commands, but interrupts `wait`, so that is called again after a USR1.
    trap 'trap "" TERM; requeue --code 143 --before "$before" "${work[@]}"; exit 143' TERM
    while kill -0 "$step" 2> /dev/null; do wait "$step" || :; done
    code=0
    wait "$step" || code=$?
    trap "" TERM # for requeue.py as well: Slurm sends it at the time limit, and to a job that has just been requeued
    # Another attempt? Not after 0 (complete), 2 (unusable), 3 (broke down) and 4 (others train what a sweep has left);
    # after anything else, as a request to stop (85), a killed rank or a node that failed, as long as checkpoints
    # advance. requeue.py says what it decides.
    requeue --code "$code" --before "$before" "${work[@]}" && exit 0
    exit "$code"
}
