"""DDP5xx on data: samples, seeds, files and what a program derives and measures."""

from ddpcheck.findings.rules.rule import rules

RULES = rules("""
DDP505 duplicate-data: error
Ranks train on the same samples in the same step.
why: The average of equal gradients is the same gradient, so all ranks together do the work of one. Usually the loader
has no DistributedSampler, or the sampler was given fixed ranks. (PyTorch docs, DistributedSampler.)
fix: Give the loader a DistributedSampler, split data by rank and world size, or use seed + rank as the seed of the
generator that draws the samples.
detected: Fingerprints of the samples in each step are compared between ranks. The samples are those of a recipe's
shards, those of a data loader with the indices of its sampler, and the inputs of forward. These cases are warnings.
Parts of a dataset overlap, in an epoch or from the second epoch on. A rank gets the samples of another rank some steps
later. The targets of a loss are the same on every rank and change with each step, but the inputs of forward differ.
Without a wrapper, the inputs of all_reduce are compared if they have as many elements as the gradients of an optimizer,
or of all optimizers. These cases are not reported. Ranks differentiate through a collective of their group. Ranks take
different parts of the same samples (context and sequence parallelism). Here, the sampler must split the data into as
many parts as there are groups, or the ranks must exchange activations. A sampler has a total_size of at least twice the
dataset (repeated augmentation).
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
detected: `ddpcheck run` records the order of indices that each sampler gives. These cases are reported. A sampler
shuffles and gives the same order in each epoch. Persistent workers give the same samples again (at least 8), although
the program has changed a plain attribute of the dataset that the samples depend on. To resume an epoch, a pass skips
its first two or more batches before any training, but the epoch had begun with different samples. A sampler is at epoch
0 although an optimizer was restored that had already seen the data. The location is the line that calls set_epoch.
Without such a line, the location is the head of the loop around the loop over the loader.
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
detected: The states of the random generators are compared at the places where each rank draws for its samples. These
places are the data loader and its workers, the forward pass of a recipe, and generators that a dataset or its
transforms hold. Batches with different samples and the same random numbers are reported. `ddpcheck run` also checks the
numbers that a training step draws before backward. These numbers are checked only if there are as many as samples, or
as elements in the inputs of forward. `ddpcheck run` also checks the noise that a step adds to the batches of a loader.
This noise is reported if it is the same on every rank and changes with each step. `ddpcheck run` does not report
dropout and other noise within forward.
ignore: If less variety is accepted, or if the same noise is intended on every rank.
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
times of the uses in this run do not matter. Files that torch.save does not write are covered only if Python opens them.
Uses of these files are also separated by a lock, or by another file that the writer makes afterwards.
ignore: If something other than a collective separates the two uses, such as a flag on disk, or if each machine has its
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
fix: Save get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)), which all ranks
call, on rank 0; load it with set_model_state_dict(..., options=StateDictOptions(full_state_dict=True,
broadcast_from_rank0=True)). Or let torch.distributed.checkpoint save all shards.
detected: Once every rank has ended, `ddpcheck run` reports torch.save of a model's shards if only some ranks have saved
theirs. In sampled steps, and in the first step after torch.load, `ddpcheck run` compares the shards of the ranks. It
reports equal shards on ranks that should hold different ones, except shards that consist of a single value. It reports
the line at which torch raises an error because whole tensors are loaded or copied into shards. It reports a single norm
over gradients if some of them are shards and others are whole. It reports load_state_dict of an optimizer if all shards
of its state are then the same on every rank. `ddpcheck report` compares the state of a recipe's optimizer before the
first step. Parameters that reach the loss only through an all_to_all (experts, tables) are shards too. An all_reduce of
their gradients over all ranks is reported.
ignore: If the file is for inspection only, or if a model of repeated blocks starts this way on purpose.
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
detected: If the gradients of ranks differ from those of their shards, a report compares the plain values that the
program holds. Values that differ are reported. `ddpcheck run` compares dictionaries with the same keys and values,
lists that are made from a set of texts and numbered by `index`, random splits of datasets, the samples of parts that
overlap, and the labels of samples. It also compares the values that the same sample has on several ranks in all epochs,
if no random numbers are drawn. Ranks that compute one model together, according to the mesh passed to
parallelize_module, should take the same samples. If these ranks take different samples, this is reported.
ignore: If ranks should hold different data, for example a table of each rank's neighbours, or samples that each rank
has augmented once.
example:
labels = {name: number for number, name in enumerate(set(names))}   # right: enumerate(sorted(set(names)))

DDP518 unreduced-metric: warning, takes_severity
A metric that is logged or decides something is the value of one rank's shard.
why: Rank 0's loss or accuracy describes 1/W of the data (W is the world size). Early stopping or best-model decisions
made from a rank's own values differ between ranks. DDP reduces gradients and nothing else.
fix: all_reduce sums and counts over the ranks, then divide.
detected: `ddpcheck run` records the values passed to a learning rate schedule. Values that differ between ranks are
reported. Metrics that are only logged, or that decide something else, are not covered.
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
detected: The samples of all shards are compared with the batch. The indices that all samplers give are compared with
the dataset. For a loader, a remainder of up to one batch per rank, or up to 5 % of the dataset, is not reported.
Samples that another epoch takes are not reported either. If all passes take at most half of the samples of a
DistributedSampler, this is reported: a framework has split the samples a second time. A sampler that splits by rank is
reported if the datasets of the ranks hold different samples, or give different samples for the same index. It is not
reported if each rank draws these samples at random.
ignore: If samples are held out on purpose.
explains: DDP303 DDP304 DDP305 DDP312
example:
def shard(batch, rank, world_size):
    return batch[5 * rank : 5 * rank + 5]   # of 12 samples two are left; right: return batch[rank::world_size]
""")
