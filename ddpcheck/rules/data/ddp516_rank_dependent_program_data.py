"""DDP516 rank-dependent-program-data: error

Data that the program derives (label map, split, vocabulary, order) differs between ranks.

Why: Class 3 on one rank is class 5 on another, or a validation sample on one rank is a training sample on another.
    Shapes agree, so no error is raised. Sets, directory listings and unseeded shuffles are the usual sources.
Fix: Sort the contents of sets and directories with sorted(), seed shuffles equally, number texts without hash()
    (zlib.crc32 is the same in every process), or compute the data on rank 0 and broadcast it.
Detected: If a rank's gradients differ from those of a single process on the same shard, `ddpcheck report` compares
    the program's variables. Numbers, texts, lists and dictionaries that differ between ranks are reported. `ddpcheck
    run` compares label maps, lists made from sets of texts, random splits of datasets, and the labels of samples. It
    reports samples that several ranks take because their datasets are ordered or split differently. It also reports
    samples whose values differ between ranks but stay the same in every epoch. Ranks that compute one model together
    (parallelize_module) should take the same samples. If these ranks take different samples, this is reported.
Ignore: If ranks should hold different data, for example a table of each rank's neighbours, or samples that each rank
    has augmented once.
Example:
    labels = {name: number for number, name in enumerate(set(names))}   # right: enumerate(sorted(set(names)))
"""
