"""DDP603 incomplete-launcher-environment: error, keeps_gradients, keeps_results

Some of the variables that give a process its rank are missing, or contradict each other.

Why: init_process_group reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Without one of them, it raises. If values
    are left over from another launcher, the ranks wait for a world that never forms. (PyTorch docs,
    torch.distributed, environment variable initialization.)
Fix: Start with torchrun, mpirun or srun, and unset variables left over from another launcher.
Detected: `ddpcheck.init_dist` reads the variables of torchrun, Open MPI, MPICH, Intel MPI and SLURM. If variables are
    missing or contradict each other, it raises an error that names them.
Ignore: Never. It is an error of start-up, and cannot be ignored.
Example:
    os.environ["RANK"] = "0"                 # and no WORLD_SIZE; right: start the script with torchrun
    ddpcheck.init_dist()
"""
