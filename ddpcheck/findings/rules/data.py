"""DDP5xx on data: samples, seeds, files and what a program derives and measures."""

from ddpcheck.findings.rules.rule import rules

RULES = rules("""
DDP505 duplicate-data: error
Ranks train on the same samples in the same step.
why: The average of equal gradients is the same gradient, so all ranks together do the work of one. Usually the loader
has no DistributedSampler, or the sampler has the same rank number in every process. (PyTorch docs, DistributedSampler.)
fix: Give the loader a DistributedSampler, split data by rank and world size, or use seed + rank as the seed of the
generator that draws the samples.
detected: ddpcheck compares the samples of the ranks in each step: a recipe's shards, samples from data loaders, and
inputs of forward. Equal samples are reported. Without a wrapper, ddpcheck compares the gradients that the ranks
all_reduce. Three cases are reported as warnings: (1) The ranks' parts of a dataset overlap within an epoch. (2) A rank
gets the samples of another rank some steps later. (3) The targets of a loss are the same on every rank, but the inputs
of forward differ. Some ranks should share samples: with tensor, context or sequence parallelism, a loss over all ranks,
or repeated augmentation. If ddpcheck recognises this, nothing is reported.
ignore: If all ranks should see the same samples, for example with different augmentation or in a part of the loss.
explains: DDP303 DDP304 DDP305 DDP312
reports: PatrickHua/SimSiam#16 Lightning-AI/pytorch-lightning#7813 coqui-ai/Trainer#144
example:
def shard(batch, rank, world_size):
    return batch[: len(batch) // world_size]   # right: return batch[rank::world_size]

DDP506 sampler-epoch: warning
The sampler's epoch never changes, so every epoch sees the same order.
why: DistributedSampler seeds its shuffle with seed + epoch. Without set_epoch, the epoch stays 0. (PyTorch docs,
DistributedSampler: call set_epoch before creating the iterator of each epoch.)
fix: Call sampler.set_epoch(epoch) at the start of every epoch, on every rank.
detected: `ddpcheck run` records the order of indices that each sampler gives. Four cases are reported. A sampler
shuffles and gives the same order in each epoch. Persistent workers give the same samples again, although the program
has changed an attribute of the dataset. A resumed epoch skips two or more batches that had not been trained on.
Training continues from the state of an optimizer that has already seen the data, but the sampler is at epoch 0.
ignore: If one order is intended, for example to compare two runs.
reports: pytorch/pytorch#31771 kan-bayashi/ParallelWaveGAN#177 lucidrains/DALLE-pytorch#230
example:
for epoch in range(epochs):
    for x in loader:                     # right: loader.sampler.set_epoch(epoch) before this loop
        step(x)

DDP510 shared-augmentation-seed: warning
Ranks draw the same random numbers for augmentation or dropout.
why: With one seed for all ranks, each rank has the same crops, flips, noise and dropout masks. So the global batch has
less variety than its size suggests.
fix: Construct the model under the same seed on every rank, then seed with seed + rank, and set no seed in the forward
pass.
detected: When ranks draw random numbers for their samples, ddpcheck compares the states of their generators. It does so
in the data loader and its workers, in the forward pass of a recipe, and for generators that a dataset or its transforms
hold. DDP510 is reported if batches have different samples but the same random numbers. `ddpcheck run` also checks
numbers that a training step draws before backward. These draws are checked only if they have one number for each
sample, or for each element of an input of forward. `ddpcheck run` also reports noise added to a loader's batches if
every rank adds the same noise. It does not report dropout and other noise within forward.
ignore: If less variety is acceptable, or if the same noise is intended on every rank.
reports: huggingface/transformers#37932 huggingface/pytorch-image-models#1519
example:
def forward(self, x):
    torch.manual_seed(0)                 # right: seed once, before the first step, with seed + rank
    return self.head(self.dropout(x))

DDP512 checkpoint-race: error, takes_severity
Several ranks write the same checkpoint, or one reads it before it is complete.
why: Writers overwrite each other, and a reader finds half a file. Without map_location, every rank loads onto rank 0's
device. (PyTorch tutorial, 'Getting Started with Distributed Data Parallel', save and load checkpoints.)
fix: Save on rank 0 only, barrier before others read, and load with map_location.
detected: `ddpcheck run` records which rank writes and reads which file, and the collectives between these uses. Two
uses by different ranks are reported if at least one of them writes, and no collective of all ranks is between them. The
two uses need not overlap in this run. Files that torch.save does not write are covered only if Python opens them. Two
uses of these files are not reported if a rank waits for a lock between them, or if the writer makes another file (a
marker) after its write. A rank that loads onto the GPU of another rank, without map_location, is reported as a warning.
ignore: If something other than a collective separates the two uses, such as a flag on disk. Or if each machine has its
own disk.
explains: DDP401 if of a cut file
reports: NVIDIA/apex#886 karpathy/nanochat#336
example:
torch.save(ddp.state_dict(), path)       # by every rank; right: if rank == 0, and dist.barrier() after it

DDP521 shard-as-whole: error
A rank's shard of the parameters is used as the whole, or the whole as a shard.
why: Under fully_shard, each parameter is a DTensor, and each rank holds one shard of it. state_dict() and to_local()
return that shard. A file of rank 0 alone lacks the shards of the other ranks. If every rank loads this file, each
parameter becomes one shard, repeated. The same happens if every rank draws the values of its shard from the same seed.
Shapes agree, so no error is raised. (PyTorch docs, torch.distributed.checkpoint.state_dict.)
fix: On all ranks, call get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)),
and save the result on rank 0. Load it on all ranks with set_model_state_dict(...,
options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)). Or let torch.distributed.checkpoint save all
shards.
detected: `ddpcheck run` reports torch.save of a model's shards if only some ranks save theirs. It compares the shards
of the ranks in some steps and after torch.load. It reports equal shards on ranks that should hold different ones. If
torch raises an error because whole tensors are loaded or copied into shards, the line is reported. `ddpcheck run` also
reports a single norm over gradients of which some are shards and others are whole. It reports load_state_dict of an
optimizer if every rank then has the same state for different shards. `ddpcheck report` reports such an optimizer state
before the first step. Parameters that reach the loss only through an all_to_all (experts, embedding tables) belong to
one rank each. An all_reduce of their gradients over all ranks is reported.
ignore: If the file is for inspection only, or if shards are equal at the start on purpose, as in a model of identical
blocks.
example:
fully_shard(model)
if rank == 0:
    torch.save(model.state_dict(), path)     # right: get_model_state_dict(model, options=FULL), on every rank

DDP516 rank-dependent-program-data: error
Data that the program derives (label map, split, vocabulary, order) differs between ranks.
why: Class 3 on one rank is class 5 on another, or a validation sample on one rank is a training sample on another.
Shapes agree, so no error is raised. Sets, directory listings and unseeded shuffles are the usual sources.
fix: Sort the contents of sets and directories with sorted(), seed shuffles equally, number texts without hash()
(zlib.crc32 is the same in every process), or compute the data on rank 0 and broadcast it.
detected: If a rank's gradients differ from those of a single process on the same shard, `ddpcheck report` compares the
program's variables. Numbers, texts, lists and dictionaries that differ between ranks are reported. `ddpcheck run`
compares label maps, lists made from sets of texts, random splits of datasets, and the labels of samples. It reports
samples that several ranks take because their datasets are ordered or split differently. It also reports samples whose
values differ between ranks but stay the same in every epoch. Ranks that compute one model together (parallelize_module)
should take the same samples. If these ranks take different samples, this is reported.
ignore: If ranks should hold different data, for example a table of each rank's neighbours, or samples that each rank
has augmented once.
example:
labels = {name: number for number, name in enumerate(set(names))}   # right: enumerate(sorted(set(names)))

DDP518 unreduced-metric: warning, takes_severity
A metric by which the script decides covers only the samples of one rank.
why: Rank 0's loss or accuracy describes 1/W of the data (W is the world size). Early stopping or best-model decisions
made from a rank's own values differ between ranks. DDP reduces gradients and nothing else.
fix: all_reduce the sum and the count over the ranks, then divide.
detected: `ddpcheck run` records the values passed to ReduceLROnPlateau, and the metrics by which Lightning's
EarlyStopping and ModelCheckpoint decide. Values that differ between ranks are reported. Other decisions, and metrics
that are only logged, are not covered.
ignore: If the schedule follows one rank on purpose, and its result is broadcast.
explains: DDP223 DDP306 DDP507
reports: Lightning-AI/pytorch-lightning#379 karpathy/llm.c#551
example:
schedule.step(evaluate(ddp, local_data))  # right: all_reduce the sum and the count, then divide

DDP519 samples-left-out: warning
Samples of the global batch are on no rank.
why: Samples that are in no shard are not trained on. If a remainder is cut off, the batch shrinks by up to world size -
1 samples. If the batch is split by fixed sizes, the same samples are lost in every step. (PyTorch docs,
DistributedSampler, drop_last.)
fix: Split by rank and world size so that the shards cover the batch, or choose a batch that divides evenly.
detected: ddpcheck compares the samples of all shards with the batch, and the indices of all samplers with the dataset.
For a loader, up to one batch per rank, or up to 5 % of the dataset, may be missing. Samples that another epoch takes
are not reported. They are reported, however, if every pass takes at most half of the samples that its
DistributedSampler gives to the rank. A framework has then split the samples a second time. Also reported: a sampler
that splits by rank, although each rank's dataset already holds different samples.
ignore: If samples are held out on purpose.
explains: DDP303 DDP304 DDP305 DDP312
example:
def shard(batch, rank, world_size):
    return batch[5 * rank : 5 * rank + 5]   # of 12 samples two are left; right: return batch[rank::world_size]
""")
