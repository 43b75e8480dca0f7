"""The checked config with a second head that always takes part; the hook compares the ranks before each checkpoint."""

_base_ = "digits_checked.py"
model = dict(always=True)
custom_hooks = [dict(type="DDPCheckHook")]
