"""DDP1xx: parameters that a backward pass does not reach."""

from ddpcheck.findings.rules.rule import rules

RULES = rules("""
DDP101 unused-parameter: error, stops_ddp
A parameter requires grad, and no operation of the forward pass ever reads it.
why: DDP all-reduces a bucket when all its gradients have arrived. The gradient of an unused parameter never arrives, so
its bucket is not reduced. The optimizer then steps with each rank's own gradients. The next forward raises 'Expected to
have finished reduction in the prior iteration'. After the last step there is no next forward, so nothing is raised.
(PyTorch docs, DistributedDataParallel, find_unused_parameters; notes on DDP, 'Backward Pass'.)
fix: Use the parameter in the forward pass, remove it, or freeze it with requires_grad_(False) before wrapping; if it is
used in some steps only, pass find_unused_parameters=True.
detected: At the start of backward, ddpcheck asks the autograd engine which parameters backward will reach. If it will
not reach all, ddpcheck runs the forward pass again and records which parameters are read. No operation reads the
reported parameter.
ignore: Never, if the finding is an error. With find_unused_parameters=True, the finding is a warning or a note. Ignore
such a finding if another phase of the training uses the parameter.
explains: DDP301 DDP302 DDP306 if same subjects; DDP307 if none is there
reports: pytorch/pytorch#43259 open-mmlab/mmdetection#2117 Megvii-BaseDetection/YOLOX#885 pytorch/pytorch#112152
example:
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)      # never called: both of its parameters are unused

    def forward(self, x):
        return self.body(x)              # right: return self.head(self.body(x))

DDP102 non-contributing-parameter: error, stops_ddp
A parameter is used in the forward pass, but its result does not reach the loss.
why: Every output of forward that depends on parameters has to contribute to the loss. If an output does not, DDP waits
for a gradient that backward never computes. The bucket is not reduced, and the next forward raises. With
find_unused_parameters=True nothing is raised, but the parameter silently never learns. (PyTorch docs,
DistributedDataParallel, forward outputs; notes on DDP.)
fix: Add the result to the loss, stop computing it, or return it from forward detached and freeze the parameter.
detected: An operation of the forward pass reads the parameter, but the autograd engine does not reach it from the loss.
The path is not cut by detach, no_grad or the like (that is DDP103): the result is simply not used.
ignore: If find_unused_parameters=True is set, and the output is left out of the loss on purpose. It is better to freeze
the parameters.
explains: DDP301 DDP302 DDP306 if same subjects; DDP307 if none is there
reports: pytorch/pytorch#57473
example:
def forward(self, x):
    return self.main(x), self.auxiliary(x)

def loss(model, batch):
    main, auxiliary = model(batch["x"])
    return mse(main, batch["y"])         # right: ... + 0.1 * mse(auxiliary, batch["z"])

DDP103 detached-parameter: error, stops_ddp
A parameter is used, but its path to the loss is cut by detach, no_grad, .data or an operation without a gradient.
why: Backward does not pass the cut, so it computes no gradient for the parameter. DDP waits for this gradient and
raises one iteration later. With find_unused_parameters=True DDP does not even raise, and this part of the model
silently never learns. (PyTorch docs, DistributedDataParallel; autograd mechanics, 'Locally disabling gradient
computation'.)
fix: Remove the cut at the place named in the finding (use a differentiable operation instead of argmax, round or
.item()), or, if the cut is intended, freeze the parameters before it with requires_grad_(False).
detected: The autograd engine does not reach the parameter from the loss. The recorded forward pass shows what cuts the
path: detach(), no_grad, inference_mode, .data, .item(), an operation without derivative, or a re-entrant checkpoint in
which no input requires grad.
ignore: If the cut is intended and the parameters are trained elsewhere. It is better to freeze the parameters.
explains: DDP301 DDP302 DDP306 if same subjects; DDP307 if none is there
reports: pytorch/pytorch#43259
example:
def forward(self, x):
    h = self.encoder(x).detach()         # the encoder never learns
    return self.head(h)                  # right: self.head(self.encoder(x))

DDP104 rank-dependent-parameter: error, stops_ddp, by_family
A parameter contributes to the loss on some ranks of a step and not on others.
why: Ranks with the gradient start the all-reduce of its bucket, and ranks without the gradient never start it. The job
then hangs until the process group's timeout (30 minutes by default, 10 with nccl). Or the ranks without the gradient
raise at their next forward, while the others are stuck in backward. (PyTorch docs, DistributedDataParallel: all ranks
must take part in every gradient synchronisation.)
fix: Make the branch the same on every rank (decide it from the step or a shared seed, not from the rank or its data),
add 0.0 * output.sum() of the branch not taken, or pass find_unused_parameters=True.
detected: In each step, before the first all-reduce, the ranks compare which parameters backward will reach. A parameter
is reported if backward will reach it on some ranks only. The finding appears before the job hangs.
ignore: Never. With find_unused_parameters=True, DDP handles such parameters, and ddpcheck does not report them.
explains: DDP306 if same subjects; DDP301 DDP302 DDP303 DDP305; quietly DDP304 DDP312; quietly DDP516 if only the loss
reports: lhotse-speech/lhotse#554
example:
def forward(self, x):
    if dist.get_rank() == 0:             # or: if x.mean() > 0, which differs with the shard
        return self.left(x)
    return self.right(x)                 # right: self.left(x) + 0.0 * self.right(x), or one choice for all ranks

DDP105 step-dependent-parameter: error, stops_ddp, by_family
A parameter contributes to the loss in some steps only.
why: In a step without the parameter, DDP waits for a gradient that never arrives. Its bucket is not reduced, and the
next forward raises. With static_graph=True the set of used parameters is fixed after the first step, so a later change
fails as well. (PyTorch docs, DistributedDataParallel, find_unused_parameters and static_graph.)
fix: Pass find_unused_parameters=True and no static_graph, or let the skipped part add 0.0 * output.sum() to the loss.
detected: ddpcheck compares from step to step which parameters backward reaches. A parameter is reported if backward
reaches it in some of the checked steps, but on no rank in others. The finding names the steps without the parameter.
ignore: Never. With find_unused_parameters=True, ddpcheck does not report such parameters.
explains: DDP306 if same subjects; DDP301 DDP302 DDP303 DDP304 DDP305 DDP312; DDP516 if only the loss
reports: Yuanhy1997/SeqDiffuSeq#25
example:
def forward(self, x):
    h = self.body(x)
    if self.step % 2 == 0:
        h = h + self.adapter(h)          # absent in every odd step
    return h                             # right: DistributedDataParallel(model, find_unused_parameters=True)

DDP106 unregistered-parameter: error
A leaf tensor receives a gradient, but is not a parameter of the wrapped module.
why: DDP knows only the parameters that module.parameters() returned when DDP was constructed. It misses parameters in a
Python list or dict, raw tensors with requires_grad, and parameters that are added after wrapping. DDP neither
broadcasts nor averages these, and every rank silently trains its own copy. (PyTorch docs, DistributedDataParallel: all
parameters must be registered before wrapping, and none added or removed later.)
fix: Register it before wrapping: nn.ModuleList, nn.ModuleDict, nn.ParameterList or nn.Parameter.
detected: ddpcheck compares the leaf tensors that receive a gradient in backward with the parameters of the wrapped
module. A leaf tensor that is not a parameter is reported.
ignore: If you average the gradient yourself, or if the tensor is an input and its gradient is only inspected.
explains: DDP301 DDP302 DDP303 DDP306 DDP515 if same subjects; quietly DDP516 if only the loss; DDP301 DDP302 DDP303
DDP305 DDP306 if made in forward; quietly DDP304 DDP312 if made in forward
example:
self.heads = [nn.Linear(8, 2) for _ in range(3)]           # a plain list hides them from DDP
# right: self.heads = nn.ModuleList(nn.Linear(8, 2) for _ in range(3))

DDP107 zero-gradient-parameter: warning
Backward reaches a parameter, and its gradient is exactly zero in every step.
why: DDP sees no fault: the gradient arrives and is reduced. But the parameter does not learn. Causes are a factor of
zero, a branch of torch.where that is never selected, or a ReLU unit that is always off. A comparison with a single
process shows nothing, because the gradient is zero there too.
fix: Find the factor that is zero (a mask, a weight, a dead ReLU, a clamp, a rounding) and remove it. If the zero is
intended, ignore DDP107.
detected: The gradient is exactly zero on every rank in every step. ddpcheck then changes the parameters slightly and
runs the step again. The parameter is reported only if its gradient is still zero. The finding names the operation in
which the gradient becomes zero.
ignore: If the zero is intended, for example 0.0 * output.sum() to satisfy DDP. Or if terms cancel rightly: a bias has
no effect on the difference of two means.
example:
loss = mse(main, y) + 0.0 * auxiliary.sum()                # right, if it should learn: a weight that is not zero

DDP108 missing-gradient: error
Backward reaches a parameter, and the gradient that it computes is None.
why: A custom autograd Function returned None for an input that requires grad. DDP's hook fires nevertheless, so nothing
is raised. Zeros are reduced, or .grad stays None, and the parameter never learns. (PyTorch docs, 'Extending PyTorch':
backward returns one gradient per input.)
fix: Return the gradient for that input from backward of the Function named in the finding, or freeze the parameter.
detected: Backward reaches the parameter, but no gradient arrives in .grad. Hooks show which custom autograd Function
returned None.
ignore: Never. Freeze the parameter if it needs no gradient.
explains: DDP307 if none is there
example:
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, None       # right: return grad * weight, (grad * x).sum_to_size(weight.shape)

DDP109 needless-find-unused: note
find_unused_parameters=True is set, and every parameter contributed in every step.
why: DDP then walks the autograd graph after every forward pass and all-reduces a bitmap of used parameters. Both waste
time in every step. (PyTorch docs, DistributedDataParallel, find_unused_parameters; DDP itself warns about it once.)
fix: Remove find_unused_parameters=True; ddpcheck reports when it is needed again.
detected: find_unused_parameters=True is set, and backward reached every parameter in every step on every rank.
ignore: If a later phase of training leaves parameters out. ddpcheck has not checked the steps of that phase.
reports: speechbrain/speechbrain#701
example:
DistributedDataParallel(model, find_unused_parameters=True)   # right here: DistributedDataParallel(model)

DDP110 uninitialised-parameter: error
A lazy parameter is wrapped before its shape is known.
why: DDP broadcasts and buckets parameters when it is constructed, and needs their sizes. It refuses a module with
uninitialised parameters. (PyTorch docs, LazyModuleMixin: initialise with dry runs.)
fix: Run one forward pass with a batch of the right shape (under no_grad) on every rank before wrapping.
detected: ddpcheck inspects the parameters of the module right before wrapping. A parameter without a known shape is
reported.
ignore: Never. DDP refuses such a module.
example:
model = nn.Sequential(nn.LazyLinear(8), nn.ReLU())
DistributedDataParallel(model)           # right: model(torch.zeros(1, 16)) first

DDP111 ignored-parameter: error
A parameter is trained, but the wrapper is configured to ignore it.
why: _set_params_and_buffers_to_ignore_for_model sets a list of names. DDP neither broadcasts nor reduces the parameters
with these names. Each rank steps with its own gradient, and the copies silently diverge.
fix: Remove its name from the list, freeze it with requires_grad_(False), or reduce its gradient yourself.
detected: ddpcheck reads the list of ignored names from the module. A parameter in this list is reported if its gradient
differs between ranks. Parameters that belong to one rank only, such as experts of a mixture, are not reported. ddpcheck
recognises them: they reach the loss only through an all_to_all that autograd differentiates.
ignore: If you average its gradient yourself, or if each rank should train its own copy.
explains: DDP208 DDP301 DDP306
example:
DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["head.weight"])
DistributedDataParallel(model)           # right: leave out names of parameters that train

DDP112 opaque-output: error, stops_ddp
forward returns an object in which DDP finds no tensor.
why: DDP looks for tensors in the output if it is a tensor, list, tuple, dict or dataclass. In any other object, DDP
finds none. With find_unused_parameters=True, DDP then treats every parameter as unused. static_graph=True fails too.
There, DDP finds no tensors in dataclasses and subclasses of dict either, unless they are registered as pytree nodes.
(PyTorch docs, DistributedDataParallel, forward outputs; torch/nn/parallel/distributed.py, _tree_flatten_with_rref.)
fix: Return a tensor, or a tuple, list or dict of tensors, from forward. Without static_graph, a dataclass of tensors
works too.
detected: ddpcheck looks for tensors in the output of forward in the same way as DDP. DDP112 is reported if there are
none, although parameters contribute to the loss.
ignore: If neither find_unused_parameters nor static_graph is set: DDP then needs no tensors.
explains: DDP301 DDP302 DDP406
example:
class Output:                            # right: decorate it with @dataclass
    def __init__(self, logits):
        self.logits = logits

def forward(self, x):
    return Output(self.body(x))
""")
