"""DDP510 shared-augmentation-seed: warning

Ranks draw the same random numbers for augmentation or dropout.

Why: With one seed for all ranks, each rank has the same crops, flips, noise and dropout masks. So the global batch
    has less variety than its size suggests.
Fix: Construct the model under the same seed on every rank, then seed with seed + rank, and set no seed in the forward
    pass.
Detected: When ranks draw random numbers for their samples, ddpcheck compares the states of their generators. It does
    so in the data loader and its workers, in the forward pass of a recipe, and for generators that a dataset or its
    transforms hold. DDP510 is reported if batches have different samples but the same random numbers. `ddpcheck run`
    also checks numbers that a training step draws before backward. These draws are checked only if they have one
    number for each sample, or for each element of an input of forward. `ddpcheck run` also reports noise added to a
    loader's batches if every rank adds the same noise. It does not report dropout and other noise within forward.
Ignore: If less variety is acceptable, or if the same noise is intended on every rank.
Reports: huggingface/transformers#37932 huggingface/pytorch-image-models#1519
Example:
    def forward(self, x):
        torch.manual_seed(0)                 # right: seed once, before the first step, with seed + rank
        return self.head(self.dropout(x))
"""
