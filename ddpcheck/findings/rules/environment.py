"""DDP6xx: the environment that ranks are started in."""

from ddpcheck.findings.rules.rule import rules

RULES = rules("""
DDP601 debug-level-crash: error
TORCH_DISTRIBUTED_DEBUG=DETAIL is set, and with gloo torch crashes when a module is wrapped.
why: In the supported versions of torch, DDP's logger casts a process group that DETAIL has wrapped. The result is a
segmentation fault, for any model and any world size. INFO is safe.
fix: Set TORCH_DISTRIBUTED_DEBUG=INFO, or call dist.set_debug_level(dist.DebugLevel.DETAIL) after init_process_group.
detected: No check reports this code, because the crash ends the process before ddpcheck can run. ddpcheck does not pass
the variable on to the ranks that it starts.
ignore: It is never reported.
example:
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
DistributedDataParallel(model)           # with gloo; right: "INFO"

DDP602 environment-differs: warning
Versions or settings that affect numbers or communication differ between ranks.
why: Different versions of torch or of the backend, a different device model, or different settings for threads or
determinism may change the numbers, the choice of algorithms, or whether ranks can communicate. DDP averages the
gradients nevertheless.
fix: Start every rank from the same image and the same environment variables.
detected: No check reports this code today. The head of a report names the platform and the versions of Python and
torch.
ignore: It is never reported.

DDP603 incomplete-launcher-environment: error
Some of the variables that give a process its rank are missing, or contradict each other.
why: init_process_group reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Without one of them, it raises. If values
are left over from another launcher, the ranks wait for a world that never forms. (PyTorch docs, torch.distributed,
environment variable initialization.)
fix: Start with torchrun, mpirun or srun, and unset variables left over from another launcher.
detected: `ddpcheck.init_dist` reads the variables of torchrun, Open MPI, MPICH, Intel MPI and SLURM. If variables are
missing or contradict each other, it raises an error that names them.
ignore: Never. It is an error of start-up, and cannot be ignored.
example:
os.environ["RANK"] = "0"                 # and no WORLD_SIZE; right: start the script with torchrun
ddpcheck.init_dist()
""")
