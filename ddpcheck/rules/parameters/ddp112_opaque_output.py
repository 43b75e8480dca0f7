"""DDP112 opaque-output: error, stops_ddp

forward returns an object in which DDP finds no tensor.

Why: DDP looks for tensors in the output if it is a tensor, list, tuple, dict or dataclass. In any other object, DDP
    finds none. With find_unused_parameters=True, DDP then treats every parameter as unused. static_graph=True fails
    too. There, DDP finds no tensors in dataclasses and subclasses of dict either, unless they are registered as
    pytree nodes. (PyTorch docs, DistributedDataParallel, forward outputs; torch/nn/parallel/distributed.py,
    _tree_flatten_with_rref.)
Fix: Return a tensor, or a tuple, list or dict of tensors, from forward. Without static_graph, a dataclass of tensors
    works too.
Detected: ddpcheck looks for tensors in the output of forward in the same way as DDP. DDP112 is reported if there are
    none, although parameters contribute to the loss.
Ignore: If neither find_unused_parameters nor static_graph is set: DDP then needs no tensors.
Explains: DDP301 DDP302 DDP406
Example:
    class Output:                            # right: decorate it with @dataclass
        def __init__(self, logits):
            self.logits = logits

    def forward(self, x):
        return Output(self.body(x))
"""
