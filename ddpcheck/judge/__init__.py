"""From evidence to findings: pure functions, which import `findings` and `stream` only, and never torch.

On which facts each of them decides, and who gathers these, is in docs/rules-in-code.md.
"""
