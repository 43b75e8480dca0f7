"""DDP5xx on data: samples, seeds, files and what a program derives and measures."""

from ddpcheck.findings.rules.rule import rules

RULES = rules("""
DDP505 duplicate-data: error
Ranks train on the same samples in the same step.
why: The average of equal gradients is the same gradient: W ranks do the work of one. Usually the loader has no
DistributedSampler, or the sampler was given fixed ranks. (PyTorch docs, DistributedSampler.)
fix: Give the loader a DistributedSampler, split data by rank and world size, or use seed + rank as the seed of the
generator that draws the samples.
detected: The samples of each rank in a step are compared by fingerprints: those of a recipe's shards, those of a data
loader with the indices of its sampler, and the inputs of forward. These are warnings: parts of a dataset that overlap,
in an epoch or from the second one on; a rank that gets the samples of another rank some steps later; and targets of a
loss that are the same on every rank and change with each step, if the inputs of forward differ. Without a wrapper, the
inputs of all_reduce are compared, if they have as many elements as the gradients of an optimizer, or of all optimizers.
Not reported are ranks that differentiate through a collective of their group; ranks that take different parts of the
same samples (context and sequence parallelism), if there are as many groups as the sampler splits the data between, or
if the ranks exchange activations; and samplers whose total_size is twice the dataset or more (repeated augmentation).
ignore: If all ranks should see the same samples, for example with different augmentation or in a part of the loss.
explains: DDP303 DDP304 DDP305 DDP312
reports: PatrickHua/SimSiam#16 Lightning-AI/pytorch-lightning#7813 coqui-ai/Trainer#144
example:
def shard(batch, rank, world_size):
    return batch[: len(batch) // world_size]   # right: return batch[rank::world_size]

DDP506 sampler-epoch: warning
The sampler's epoch never changes, so every epoch sees the same order.
why: DistributedSampler shuffles from seed + epoch. Without set_epoch the epoch stays 0. (PyTorch docs,
DistributedSampler: call set_epoch before creating the iterator of each epoch.)
fix: Call sampler.set_epoch(epoch) at the start of every epoch, on every rank.
detected: `ddpcheck run` records the order of indices that each sampler gives. Reported are: a sampler that shuffles and
gives the same order in each epoch; persistent workers that give the same sample again for 8 indices or more, although
the program has changed a plain attribute of the dataset with which a copy makes different samples; a pass whose first
two or more batches are skipped before any training, to resume an epoch, if the epoch had begun with different samples;
and a sampler that is at epoch 0 after an optimizer was restored that had already seen the data. The location is the
line that calls set_epoch, else the head of the loop around the one over the loader.
ignore: If one order is intended, for example to compare two runs.
reports: pytorch/pytorch#31771 kan-bayashi/ParallelWaveGAN#177 lucidrains/DALLE-pytorch#230
example:
for epoch in range(epochs):
    for x in loader:                     # right: loader.sampler.set_epoch(epoch) before this loop
        step(x)

DDP510 shared-augmentation-seed: warning
Ranks draw the same random numbers for augmentation or dropout.
why: One seed for all ranks gives each rank the same crops, flips, noise and dropout masks: less variety than the size
of the global batch suggests.
fix: Construct the model under the same seed on every rank, then seed with seed + rank, and set no seed in the forward
pass.
detected: The states of the random generators are compared at the places where each rank draws for its samples: in the
data loader and its workers, in the forward pass of a recipe, and in generators that a dataset or its transforms hold.
Batches with different samples and the same random numbers are reported. `ddpcheck run` also follows the numbers that a
training step draws between two optimizer steps, before backward, if there are as many as samples or as elements in the
inputs of forward; and the noise that a step adds to the batches of a loader, if it is the same on every rank and
changes with each step. Dropout and other noise within forward is not reported there.
ignore: If less variety is accepted, or if the same noise is intended on every rank.
reports: huggingface/transformers#37932 huggingface/pytorch-image-models#1519
example:
def forward(self, x):
    torch.manual_seed(0)                 # right: seed once, before the first step, with seed + rank
    return self.head(self.dropout(x))

DDP512 checkpoint-race: error, takes_severity
Several ranks write the same checkpoint, or one reads it before it is complete.
why: Writers overwrite each other, and a reader finds half a file; without map_location every rank loads onto rank 0's
device. (PyTorch tutorial, 'Getting Started with Distributed Data Parallel', save and load checkpoints.)
fix: Save on rank 0 only, barrier before others read, and load with map_location.
detected: `ddpcheck run` records which rank writes and reads which file, and the collectives between. Two uses by
different ranks, at least one of which writes, are reported if no collective of all ranks is between them, whatever
their times in this run. Of files that torch.save does not write, only those that Python opens are covered; a lock, or
another file that the writer makes after it, separates these too.
ignore: If something other than a collective separates the two, such as a flag on disk, or if each machine has its own
disk.
explains: DDP401 if of a cut file
reports: NVIDIA/apex#886 karpathy/nanochat#336
example:
torch.save(ddp.state_dict(), path)       # by every rank; right: if rank == 0, and dist.barrier() after it

DDP521 shard-as-whole: error
A rank's shard of the parameters is used as the whole, or the whole as a shard.
why: Under fully_shard each parameter is a DTensor, of which a rank holds one shard; state_dict() and to_local() return
that shard. A file of rank 0 alone lacks the shards of the others. Loaded on every rank, it makes each parameter one
shard, repeated; so do values that every rank draws for its shard from the same seed. Shapes agree, so nothing is
raised. (PyTorch docs, torch.distributed.checkpoint.state_dict.)
fix: Save get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)), which all ranks
call, on rank 0; load it with set_model_state_dict(..., options=StateDictOptions(full_state_dict=True,
broadcast_from_rank0=True)). Or let torch.distributed.checkpoint save all shards.
detected: `ddpcheck run` reports torch.save of all shards of a model on some ranks only, once every rank has ended. It
compares the shards of the ranks in sampled steps and in the first step after torch.load, and reports shards that are
the same on ranks that should hold different ones, apart from those that consist of a single value. It reports the line
at which torch raises because whole tensors are loaded or copied into shards; a single norm over gradients of which some
are shards and others are whole; and a load_state_dict of an optimizer after which all shards of its state are the same
on every rank. `ddpcheck report` compares the state of a recipe's optimizer before the first step. Parameters that reach
the loss through an all_to_all only (experts, tables) are shards too: an all_reduce of their gradients over all ranks is
reported.
ignore: If the file is for inspection only, or if a model of repeated blocks starts this way on purpose.
example:
fully_shard(model)
if rank == 0:
    torch.save(model.state_dict(), path)     # right: get_model_state_dict(model, options=FULL), on every rank

DDP516 rank-dependent-program-data: error
Data that the program derives (label map, split, vocabulary, order) differs between ranks.
why: Class 3 on one rank is class 5 on another, or a validation sample on one is a training sample on the next. Shapes
agree, so nothing is raised. Sets, directory listings and unseeded shuffles are the usual sources.
fix: Sort the contents of sets and directories with sorted(), seed shuffles equally, number texts without hash()
(zlib.crc32 is the same in every process), or compute the data on rank 0 and broadcast it.
detected: If the gradients of ranks differ from those of their shards, the plain values that the program holds are
compared; those that differ are reported. `ddpcheck run` compares dictionaries with the same keys and values, lists that
are made from a set of texts and numbered by `index`, random splits of datasets, the samples of parts that overlap, the
labels of samples, and the values that the same sample has on several ranks in all epochs, if no random numbers are
drawn. Ranks that compute one model together, according to the mesh passed to parallelize_module, should take the same
samples: those that do not are reported.
ignore: If ranks should hold different data, for example a table of each rank's neighbours, or samples that each rank
has augmented once.
example:
labels = {name: number for number, name in enumerate(set(names))}   # right: enumerate(sorted(set(names)))

DDP518 unreduced-metric: warning, takes_severity
A metric that is logged or decides something is the value of one rank's shard.
why: Rank 0's loss or accuracy describes 1/W of the data, and early stopping or best-model decisions made from it differ
between ranks. DDP reduces gradients and nothing else.
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
why: Samples that are in no shard are not trained on. A remainder that is cut off shrinks the batch by up to world size
- 1 samples; a split by fixed sizes loses the same samples in every step. (PyTorch docs, DistributedSampler, drop_last.)
fix: Split by rank and world size so that the shards cover the batch, or choose a batch that divides evenly.
detected: The samples of all shards, or the indices that all samplers give, are compared with the batch or the dataset.
For a loader, a remainder of less than one batch per rank is not reported, nor are samples that another epoch takes. If
all passes take at most half of the samples of a DistributedSampler, that is reported: a framework has split them a
second time. A sampler that splits by rank is reported if the datasets of the ranks hold different samples, or give
different samples for the same index, and each rank does not draw them at random.
ignore: If samples are held out on purpose.
explains: DDP303 DDP304 DDP305 DDP312
example:
def shard(batch, rank, world_size):
    return batch[5 * rank : 5 * rank + 5]   # of 12 samples two are left; right: return batch[rank::world_size]
""")
