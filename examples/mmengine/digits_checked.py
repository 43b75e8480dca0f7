"""The same config, with the wrapper that finds what is wrong: DDP104, on the rank whose batch has no nine."""

_base_ = "digits.py"
custom_imports = dict(imports=["digits_net", "ddpcheck.integrations.mmengine"], allow_failed_imports=False)
model_wrapper_cfg = dict(type="CheckedMMDistributedDataParallel")
