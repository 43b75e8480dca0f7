"""DDP514 accumulation-scale: error

Accumulated gradients are not scaled by the number of micro-steps, or by the number of tokens in each.

Why: backward adds gradients up. Without division, the step grows with the number of micro-steps. If the last
    accumulation is shorter but is divided by the same number, its step is too small. If micro-batches have unequal
    numbers of tokens, their mean is a mean of means: tokens of the shorter ones count more.
    (huggingface/transformers#34191 fixed this in one trainer.)
Fix: Divide each micro-step's loss by the number of micro-steps of this accumulation; if micro-batches have unequal
    numbers of tokens, let each loss be a sum over tokens, and divide it by the number of tokens in all micro-batches
    of the accumulation.
Detected: `ddpcheck report` compares the number of backward passes on a rank with the number in a single process.
    DDP514 is reported if the gradient is wrong by the ratio of these numbers. `ddpcheck run` reports DDP514 if the
    loss of each micro-batch is a mean over this micro-batch, and nothing divides these losses by their number. It
    recognises micro-batches by the batches of a loader or by no_sync. All their backward passes must come from one
    line. `ddpcheck run` and `ddpcheck.watch` also measure how much each cross-entropy target counts. They report
    targets that count more because their micro-batch has fewer targets.
Ignore: If the learning rate was tuned with the sum, or if micro-batches should have the same weight, however many
    tokens they have.
Reports: huggingface/transformers#34191 huggingface/transformers#24725 meta-pytorch/torchtune#1875
Example:
    for part in batch.split(4):
        loss(ddp, part).backward()           # right: (loss(ddp, part) / len(batch.split(4))).backward()
"""
