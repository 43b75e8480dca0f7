"""DDP2xx: properties that must be equal on all ranks before and after wrapping."""

from ddpcheck.findings.rules.rule import rules

RULES = rules("""
DDP201 parameter-set: error
The set of parameters differs between ranks.
why: DDP matches parameters by position. At construction DDP compares how many parameters require grad, and their sizes,
but not their names. If the numbers differ, some ranks raise and the others lose the connection. If only the names
differ, DDP averages tensors that have nothing to do with each other. (PyTorch docs, DistributedDataParallel: the model
must be the same on every rank.)
fix: Build the same module on every rank: the constructor must not depend on the rank, its data or its environment.
detected: Before DDP's first collective, the ranks compare the names of their parameters.
ignore: Never. Ranks with different parameters cannot train one model.
reports: pytorch/pytorch#102438 huggingface/accelerate#1481 NJU-PCALab/STAR#44
example:
if dist.get_rank() == 0:
    model.probe = nn.Linear(8, 8)        # right: on every rank, or on none

DDP202 parameter-order: error
The same parameters are registered in a different order on different ranks.
why: DDP broadcasts and reduces by position. If the shapes are equal, nothing is raised, and DDP averages the gradients
of different layers with each other. If the shapes differ, construction fails only on the rank that differs. (PyTorch
docs, DistributedDataParallel: parameters must be registered in the same order.)
fix: Register modules in a fixed order: iterate over a list or a sorted() set, never over a set or os.listdir().
detected: Before DDP's first collective, the ranks compare the order of the parameters that all ranks have.
ignore: Never. DDP pairs parameters by position.
explains: DDP301 DDP302 DDP306 if an error
example:
for name in {"left", "right"}:           # the order of a set of strings differs between processes
    self.add_module(name, nn.Linear(8, 8))   # right: for name in ("left", "right")

DDP203 parameter-shape: error
The shape of a parameter differs between ranks.
why: DDP verifies sizes when it is constructed. The rank that differs raises, and the others get a closed connection or
wait. (PyTorch docs, DistributedDataParallel: corresponding parameters must have the same sizes.)
fix: Give the parameter the same size on every rank: compute the size once (vocabulary, number of classes) and broadcast
it, or configure it.
detected: Before DDP's first collective, the ranks compare the shapes of parameters with the same name.
ignore: Never.
example:
classes = len(set(local_labels))         # counts what this rank happens to see; right: a constant for all ranks
self.head = nn.Linear(8, classes)

DDP204 parameter-dtype: error
The dtype of a parameter differs between ranks.
why: DDP does not compare dtypes. If the element sizes differ, the process aborts inside the backend, without a Python
traceback. If the element sizes are equal (float16 and bfloat16), the bits are summed as if the dtype were the same.
Nothing is raised, and the gradients are completely wrong.
fix: Cast on every rank or on none, before wrapping; decide it from the configuration, not from the local device.
detected: Before DDP's first collective, the ranks compare the dtypes of parameters with the same name.
ignore: Never.
example:
model.to(torch.bfloat16 if supports_bf16() else torch.float16)   # right: the same dtype on all ranks

DDP205 parameter-stride: error
The memory layout (strides) of a parameter differs between ranks.
why: DDP reduces flat memory, so all ranks must lay out a tensor in the same way. Construction fails on the rank that
differs. The message prints the sizes, which are equal. (PyTorch docs, DistributedDataParallel: corresponding parameters
must have the same strides.)
fix: Apply memory_format=torch.channels_last (or a transposed weight) on every rank or on none, before wrapping.
detected: Before DDP's first collective, the ranks compare the strides of parameters with the same name.
ignore: Never. DDP refuses the module, or averages elements of different positions.
example:
if torch.cuda.is_available():            # true on some machines only
    model = model.to(memory_format=torch.channels_last)   # right: on every rank

DDP206 requires-grad: error
A parameter requires grad on one rank and is frozen on another.
why: Only parameters that require grad are put into buckets, by position. If the numbers of these parameters differ,
construction raises. If the numbers and the shapes are equal, nothing is raised, and the gradients of different layers
are averaged. (PyTorch docs, DistributedDataParallel: requires_grad must be the same on all ranks.)
fix: Freeze the same parameters on every rank, before wrapping.
detected: Before DDP's first collective, the ranks compare requires_grad of each parameter. After a forward pass that
may change requires_grad, the ranks compare it again.
ignore: Never. Freeze the same parameters on every rank.
example:
model.layers[dist.get_rank()].requires_grad_(False)   # right: the same layer on every rank

DDP207 parameter-device: error
The device type of a parameter differs between ranks, or within a rank.
why: The collectives of one process group run on one type of device. A rank that is left on the CPU fails, or waits
while the others use the GPU. DDP asserts one device type within a rank, but compares nothing between ranks. (PyTorch
docs, DistributedDataParallel, device_ids.)
fix: Move the module with module.to(device) on every rank before wrapping; make a missing GPU an error.
detected: Before DDP's first collective, the ranks compare the device types of their parameters. Each rank also compares
the device types of all its parameters.
ignore: Never.
example:
device = "cuda" if torch.cuda.is_available() else "cpu"   # a rank without a GPU falls back without a message
DistributedDataParallel(model.to(device))                 # right: raise where the GPU is missing

DDP208 parameter-value: error
The value of a parameter differs between ranks.
why: DDP broadcasts rank 0's values once, when it is constructed, and never again. Values that differ after that stay
different. Causes are init_sync=False, a checkpoint loaded on one rank, and re-initialisation after wrapping. The
averaged gradient is then right for none of the models. (PyTorch docs, DistributedDataParallel: parameters are never
broadcast between processes after construction.)
fix: Construct the model under the same seed on every rank, let DDP synchronise (init_sync=True), and load values before
wrapping.
detected: Right after the wrapper is constructed, the ranks compare the values of their parameters, bit by bit. If a
script averages gradients by hand, without a wrapper, `ddpcheck run` compares the initial values of these parameters.
ignore: If the ranks train different models on purpose.
explains: DDP301 DDP302 DDP303 DDP304 DDP305 DDP312 DDP306; DDP516 if only the loss
example:
torch.manual_seed(dist.get_rank())       # every rank starts from other weights
model = DistributedDataParallel(Net(), init_sync=False)   # right: leave init_sync at True

DDP209 tied-parameters: error
Parameters are one tensor under several names on one rank, and separate tensors on another.
why: DDP counts a tied parameter once. If only some ranks tie, the lists of parameters have different lengths or pair up
the wrong tensors (see DDP201 and DDP202).
fix: Tie on every rank, before wrapping, and tie again after anything that replaces parameters (casting, loading).
detected: Before DDP's first collective, the ranks compare which names share one tensor.
ignore: Never.
explains: DDP516 if only the loss
example:
if os.path.exists(checkpoint):           # true on one machine only
    model.head.weight = model.embedding.weight   # right: on every rank

DDP221 wrapper-options: error
The options of DistributedDataParallel differ between ranks.
why: If find_unused_parameters differs, the ranks hang. If static_graph differs, the process aborts. If bucket_cap_mb
differs and find_unused_parameters=True is set, the process aborts too. If broadcast_buffers differs, some ranks wait in
a broadcast that the others never start.
fix: Pass the same options on every rank; take them from one configuration that all ranks read.
detected: Before DDP's first collective, the ranks compare the arguments of DistributedDataParallel.
ignore: Never. The options decide which collectives run.
example:
DistributedDataParallel(model, find_unused_parameters=dist.get_rank() == 0)   # right: one value for all

DDP222 module-structure-or-mode: error
The classes of the modules, or their mode (train or eval), differ between ranks.
why: Equal parameters do not make an equal function. For example, one rank has a ReLU and another a GELU, or dropout is
switched off on one rank. DDP then silently averages gradients of different models.
fix: Build the same structure on every rank, and call train() or eval() on every rank at the same places.
detected: Before DDP's first collective, the ranks compare their modules by name: the class, the options and the mode
(train or eval). In later steps, the ranks compare the mode again.
ignore: If modules of different ranks compute different functions on purpose.
explains: DDP214 DDP215 DDP216 DDP301 DDP302 DDP304 DDP305 DDP312 DDP516
example:
if dist.get_rank() == 0:
    evaluate(model)                      # calls model.eval() and does not go back; right: model.train() after it

DDP223 optimizer-options: error
The optimizer, its options or its parameter groups differ between ranks.
why: DDP averages gradients and nothing else. The ranks stay equal only if every optimizer makes the same update from
these gradients. With a different learning rate, momentum or order of groups, the ranks silently diverge from the first
step. (PyTorch docs, DistributedDataParallel: all processes must make the same parameter updates.)
fix: Construct the optimizer from the same options and the same order of parameters on every rank.
detected: Before training and at the optimizer's steps, the ranks compare the class, the options and the parameter
groups of the optimizer.
ignore: If the optimizer holds parameters that only one rank trains.
explains: DDP306
example:
SGD(model.parameters(), lr=0.1 * (1 + dist.get_rank()))   # right: lr=0.1 on every rank
""")
