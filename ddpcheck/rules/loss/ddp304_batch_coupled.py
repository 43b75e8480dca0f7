"""DDP304 batch-coupled: warning

Gradients differ from the single process because samples of a batch influence each other.

Why: Under DDP, these see only the rank's own samples: BatchNorm, contrastive losses with negatives from the batch,
    batch-wide dice and ranking losses. So the result depends on how the batch is split. This is often accepted, but
    training differs from training in one process. (PyTorch docs, SyncBatchNorm.)
Fix: Convert with nn.SyncBatchNorm.convert_sync_batchnorm, use GroupNorm or LayerNorm, or gather the batch with a
    differentiable all_gather; if coupling within a rank is intended, ignore DDP304.
Detected: In a single process, ddpcheck computes the gradients of the global batch and those of each rank's samples.
    If they differ, ddpcheck tests whether samples influence each other. Coupling is reported if a module's output for
    one sample depends on other samples. It is also reported if a line of code combines samples. To find other
    couplings, ddpcheck changes the first layer's outputs for some samples. Coupling is reported if the gradients at
    these outputs change for other samples. A second, large change is for losses that use only the hardest or easiest
    samples: it makes them select different ones.
Ignore: If coupling within a rank is intended, as with plain BatchNorm, local negatives or batch dice. Many people
    train this way on purpose. So the finding is a warning, however large the difference is. If the loss only gives
    samples different weights, see DDP305.
Explains: DDP214 DDP215 if its statistics
Reports: pytorch/pytorch#49794 huggingface/accelerate#1154
Example:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8))
    # right: model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
"""
