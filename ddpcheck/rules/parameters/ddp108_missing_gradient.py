"""DDP108 missing-gradient: error

Backward reaches a parameter, and the gradient that it computes is None.

Why: A custom autograd Function returned None for an input that requires grad. DDP's hook fires nevertheless, so
    nothing is raised. Zeros are reduced, or .grad stays None, and the parameter never learns. (PyTorch docs,
    'Extending PyTorch': backward returns one gradient per input.)
Fix: Return the gradient for that input from backward of the Function named in the finding, or freeze the parameter.
Detected: Backward reaches the parameter, but no gradient arrives in .grad. Hooks show which custom autograd Function
    returned None.
Ignore: Never. Freeze the parameter if it needs no gradient.
Explains: DDP307 if none is there
Example:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad * weight, None       # right: return grad * weight, (grad * x).sum_to_size(weight.shape)
"""
