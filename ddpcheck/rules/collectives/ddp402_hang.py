"""DDP402 hang: error

Ranks wait for something that never arrives.

Why: A collective ends when every rank has entered it. A rank may take a different branch, wait for a lock, loop or be
    slow. The others then wait until the process group's timeout: 30 minutes by default, 10 with nccl. (PyTorch docs,
    init_process_group, timeout.)
Fix: Compare the places and stacks of the ranks, and bring the rank that is elsewhere into the same collective; if a
    rank is working and only slow, give it more time (--timeout).
Detected: DDP402 is reported if no rank has failed and some ranks do not finish in time. ddpcheck compares the Python
    stacks of the ranks and their logs of collectives. Ranks that wait for no other rank are named as the cause. If
    ranks wait in init_process_group, `ddpcheck run` compares the rank, world size and address of each. `ddpcheck
    hang` reads Flight Recorder dumps, and finds out which rank waits for which in all process groups. It names the
    rank for which the others wait. It also says why: this rank stopped calling collectives, came late, left no dump,
    or its GPU has not completed a collective that others have completed.
Ignore: If the rank is only slow. Give it more time with --timeout or --check-timeout.
Reports: Lightning-AI/pytorch-lightning#10947
Example:
    if dist.get_rank() == 0:
        dist.barrier()                       # right: outside the condition, on every rank
"""
