"""DDP518 unreduced-metric: warning, takes_severity

A metric by which the script decides covers only the samples of one rank.

Why: Rank 0's loss or accuracy describes 1/W of the data (W is the world size). Early stopping or best-model decisions
    made from a rank's own values differ between ranks. DDP reduces gradients and nothing else.
Fix: all_reduce the sum and the count over the ranks, then divide.
Detected: `ddpcheck run` records the values passed to ReduceLROnPlateau, and the metrics by which Lightning's
    EarlyStopping and ModelCheckpoint decide. Values that differ between ranks are reported. Other decisions, and
    metrics that are only logged, are not covered.
Ignore: If the schedule follows one rank on purpose, and its result is broadcast.
Explains: DDP223 DDP306 DDP507
Reports: Lightning-AI/pytorch-lightning#379 karpathy/llm.c#551
Example:
    schedule.step(evaluate(ddp, local_data))  # right: all_reduce the sum and the count, then divide
"""
