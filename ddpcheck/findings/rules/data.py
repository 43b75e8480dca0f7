"""DDP5xx on data: samples, seeds, files and what a program derives and measures."""

from ddpcheck.findings.rules.rule import rules

RULES = rules("""
DDP505 duplicate-data: error
Ranks train on the same samples in the same step.
why: The average of equal gradients is the same gradient: W ranks do the work of one. Usually the loader has no
DistributedSampler, or the sampler was given fixed ranks. (PyTorch docs, DistributedSampler.)
fix: Give the loader a DistributedSampler, split data by rank and world size, or seed what draws samples by seed + rank.
detected: The samples that each rank gets in a step are compared by fingerprints: those of a recipe's shards, of a data
loader with the indices of its sampler, and of the inputs of forward. Parts of a dataset that overlap, in an epoch or
from the second one on, are a warning; so is a rank that is given what another one is given some steps later, and so
are targets of a loss that are the same on every rank, and others in each step, where forward is given other inputs.
Without a wrapper, what all_reduce is given is compared, if it has as many elements as the gradients of an optimizer, or
of all. Ranks that differentiate through a collective of their own group are not reported, nor those that take other
parts of the same samples (context and sequence parallelism), if they are as many groups as the sampler deals to or
exchange activations; nor samplers whose total_size is twice the dataset or more (repeated augmentation).
ignore: If all ranks are to see the same samples, for example with other augmentation or in a part of the loss.
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
detected: `ddpcheck run` records the order of indices that each sampler gives. A sampler that shuffles and gives the
same order in each epoch is reported; so are workers that stay and give the same sample again for 8 indices or more,
although the program has changed a plain attribute of the dataset itself, with which a copy makes other samples; and a
pass whose first batches (two or more) are gone before anything is trained, to resume an epoch, if the epoch had begun
with other samples; and a sampler that is at epoch 0 after an optimizer was restored that had gone through the data
before. The location is the line that calls set_epoch, else the head of the loop around the one over the loader.
ignore: If one order is meant, for example to compare two runs.
reports: pytorch/pytorch#31771 kan-bayashi/ParallelWaveGAN#177 lucidrains/DALLE-pytorch#230
example:
for epoch in range(epochs):
    for x in loader:                     # right: loader.sampler.set_epoch(epoch) before this loop
        step(x)

DDP510 shared-augmentation-seed: warning
Ranks draw the same random numbers for augmentation or dropout.
why: One seed for all ranks gives each the same crops, flips, noise and dropout masks: less variety than the size of the
global batch suggests.
fix: Seed model construction equally, seed with seed + rank after it, and set no seed in the forward pass.
detected: The states of the random generators are compared where each rank draws for its samples: in the data loader and
in its workers, and in the forward pass of a recipe; also those of generators that a dataset or its transforms hold.
Batches with other samples and the same numbers are reported. `ddpcheck run` also follows what a training step draws
between two optimizer steps, before backward: as many numbers as there are samples, or elements in what forward is
given; and what a step adds to the batches of a loader, which is the same on every rank and another in each step.
Dropout and other noise within forward is not reported there.
ignore: If less variety is accepted, or if the same noise is meant on every rank.
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
different ranks, of which one writes, are reported if no collective of all ranks is between them, whatever the clock
said in this run. Of files that are not written by torch.save, those count that Python opens; a lock, or another file
that the writer makes after it, keeps these apart too.
ignore: If something else than a collective keeps the two apart, such as a flag on disk, or if each machine has a disk
of its own.
explains: DDP401 if of a cut file
reports: NVIDIA/apex#886 karpathy/nanochat#336
example:
torch.save(ddp.state_dict(), path)       # by every rank; right: if rank == 0, and dist.barrier() after it

DDP521 shard-as-whole: error
A rank's shard of the parameters is taken for the whole of them, or the whole for a shard.
why: Under fully_shard each parameter is a DTensor, of which a rank holds one part; state_dict() and to_local() give
that part. A file of rank 0 alone lacks the parts of the others. Loaded on every rank, it makes each parameter one part,
repeated; so do values that every rank draws for its part from the same seed. Shapes agree, so nothing is raised.
(PyTorch docs, torch.distributed.checkpoint.state_dict.)
fix: Save get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)), which all ranks
call, on rank 0; load it by set_model_state_dict(..., options=StateDictOptions(full_state_dict=True,
broadcast_from_rank0=True)). Or let torch.distributed.checkpoint save all parts.
detected: `ddpcheck run` looks at what torch.save is given: all shards of a model, of some ranks only, when every rank
has come to its end, are reported. It compares the shards of the ranks in sampled steps and in the first step after
torch.load: where all that are not of one value only are the same on ranks that should have different parts, that is
reported. Where torch raises since whole tensors are loaded or copied into shards, that is reported at the line that
does it; so is one norm of gradients that are shards and of others that are whole, and an optimizer's load_state_dict
after which all parts of its state are the same on every rank; `ddpcheck report` looks at the state that a recipe's
optimizer has before the first step. Parameters that the loss has through an all_to_all only (experts, tables) are
parts, too: an all_reduce of their gradients over all ranks is reported.
ignore: If the file is for inspection only, or if a model of repeated blocks is meant to begin so.
example:
fully_shard(model)
if rank == 0:
    torch.save(model.state_dict(), path)     # right: get_model_state_dict(model, options=FULL), on every rank

DDP516 rank-dependent-program-data: error
Data that the program derives (label map, split, vocabulary, order) differs between ranks.
why: Class 3 on one rank is class 5 on another, or a validation sample on one is a training sample on the next. Shapes
agree, so nothing is raised. Sets, directory listings and unseeded shuffles are the usual sources.
fix: Put what comes from sets and directories through sorted(), seed shuffles equally, number texts without hash()
(zlib.crc32 is the same in every process), or compute it on rank 0 and broadcast it.
detected: Ranks whose gradients are not those of their shards are asked for the plain values that the program holds;
those that differ are reported. `ddpcheck run` compares dictionaries with the same keys and values, lists that are made
of a set of texts and numbered by `index`, the random splits of datasets, the samples of parts that overlap, the labels
of samples, and the values that the same sample has on several ranks in all epochs, where no random numbers are drawn.
Ranks that compute one model together, by the mesh that parallelize_module is given, are to take the same samples: those
that do not are reported.
ignore: If ranks are to hold other data on purpose, for example a table of each rank's neighbours, or samples that each
has augmented once.
example:
labels = {name: number for number, name in enumerate(set(names))}   # right: enumerate(sorted(set(names)))

DDP518 unreduced-metric: warning, takes_severity
A metric that is logged or decides something is the value of one rank's shard.
why: Rank 0's loss or accuracy describes 1/W of the data, and early stopping or best-model decisions made from it differ
between ranks. DDP reduces gradients and nothing else.
fix: all_reduce sums and counts over the ranks, then divide.
detected: `ddpcheck run` records the values that a learning rate schedule is given. Values that differ between ranks are
reported. Metrics that are only logged, or decide something else, are not seen.
ignore: If the schedule is to follow one rank on purpose, and its result is broadcast.
explains: DDP223 DDP306 DDP507
reports: Lightning-AI/pytorch-lightning#379 karpathy/llm.c#551
example:
schedule.step(evaluate(ddp, local_data))  # right: all_reduce the sum and the count, then divide

DDP519 samples-left-out: warning
Samples of the global batch are on no rank.
why: What no shard holds is not trained on. A remainder that is cut off shrinks the batch by up to world size - 1
samples; a split by fixed sizes loses the same samples in every step. (PyTorch docs, DistributedSampler, drop_last.)
fix: Split by rank and world size so that the shards cover the batch, or choose a batch that divides evenly.
detected: The samples of all shards, or the indices that all samplers give, are compared with the batch or the dataset.
A remainder of less than one batch of each rank is not reported for a loader, nor what another epoch takes; but for all
passes that take at most half of what a DistributedSampler gives, since a framework splits that once more. A sampler
that splits by rank is reported if the datasets of the ranks hold other samples, or give others for the same index, and
are not drawn at random by each rank.
ignore: If samples are held out on purpose.
explains: DDP303 DDP304 DDP305 DDP312
example:
def shard(batch, rank, world_size):
    return batch[5 * rank : 5 * rank + 5]   # of 12 samples two are left; right: return batch[rank::world_size]
""")
