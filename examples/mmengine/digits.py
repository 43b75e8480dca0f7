"""A config as mmengine's users write them. With two ranks it stops: not every batch has a nine in it."""

custom_imports = dict(imports=["digits_net"], allow_failed_imports=False)

model = dict(type="DigitsNet")
train_dataloader = dict(
    batch_size=8,
    num_workers=0,
    dataset=dict(type="Digits"),
    sampler=dict(type="DefaultSampler", shuffle=True),
    collate_fn=dict(type="default_collate"),
)
train_cfg = dict(by_epoch=True, max_epochs=1)
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.1))
model_wrapper_cfg = dict(
    type="MMDistributedDataParallel",
    detect_anomalous_params=True,
    broadcast_buffers=False,
    device_ids=None,  # for a CPU
)
randomness = dict(seed=1)
launcher = "pytorch"
work_dir = "work_dirs/digits"
