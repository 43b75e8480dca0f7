"""DDP512 checkpoint-race: error, takes_severity

Several ranks write the same checkpoint, or one reads it before it is complete.

Why: Writers overwrite each other, and a reader finds half a file. Without map_location, every rank loads onto rank
    0's device. (PyTorch tutorial, 'Getting Started with Distributed Data Parallel', save and load checkpoints.)
Fix: Save on rank 0 only, barrier before others read, and load with map_location.
Detected: `ddpcheck run` records which rank writes and reads which file, and the collectives between these uses. Two
    uses by different ranks are reported if at least one of them writes, and no collective of all ranks is between
    them. The two uses need not overlap in this run. Files that torch.save does not write are covered only if Python
    opens them. Two uses of these files are not reported if a rank waits for a lock between them, or if the writer
    makes another file (a marker) after its write. A rank that loads onto the GPU of another rank, without
    map_location, is reported as a warning.
Ignore: If something other than a collective separates the two uses, such as a flag on disk. Or if each machine has
    its own disk.
Explains: DDP401 if of a cut file
Reports: NVIDIA/apex#886 karpathy/nanochat#336
Example:
    torch.save(ddp.state_dict(), path)       # by every rank; right: if rank == 0, and dist.barrier() after it
"""
